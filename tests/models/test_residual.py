import keras
import numpy as np
import pytest

from ddl.errors import ConfigError
from ddl.models import resnet


def small(**arguments):
    arguments = {"blocks": (1, 1), "width": 4, "stem": "small", "input_mean": 0, **arguments}
    return resnet((8, 8, 1), 10, input_deviation=16, **arguments)


def test_the_defaults_are_version_1_5():
    model = resnet((224, 224, 3), 1000)
    assert model.get_layer("stem_pool").output.shape == (None, 56, 56, 64)
    assert model.get_layer("stage4_block3_add").output.shape == (None, 7, 7, 2048)
    # The 3×3 convolution has the stride.
    assert model.get_layer("stage2_block1_1_conv").strides == (1, 1)
    assert model.get_layer("stage2_block1_2_conv").strides == (2, 2)


@pytest.mark.parametrize("bottleneck", [True, False])
def test_a_block_begins_as_the_identity(bottleneck):
    images = np.random.default_rng(0).integers(0, 17, (3, 8, 8, 1)).astype("u1")
    for zero, same in ((True, True), (False, False)):
        model = small(blocks=(2,), bottleneck=bottleneck, zero_last_gamma=zero)
        before, after = (model.get_layer(f"stage1_block{n}_relu").output for n in (1, 2))
        one, other = keras.Model(model.inputs, [before, after])(images)
        assert np.array_equal(one, other) == same


def test_decay_is_of_kernels_alone():
    model = small(kernel_regularizer=keras.regularizers.L2(0.5))
    decayed = {v.path.split("/")[-1] for v in model.trainable_variables if v.regularizer}
    assert decayed == {"kernel"}
    assert all(v.regularizer for v in model.trainable_variables if v.path.endswith("kernel"))


def test_raw_images_of_any_size_come_in_and_logits_go_out():
    for size in (7, 8, 33):
        model = resnet((size, size, 3), 5, blocks=(1, 1), width=4)
        assert model(np.full((2, size, size, 3), 124, np.uint8)).shape == (2, 5)
    bright = np.full((1, 8, 8, 3), 255, np.uint8)
    scaled = model.get_layer("scale")(bright.astype("float32"))[0, 0, 0]
    np.testing.assert_allclose(scaled, [2.2489, 2.4286, 2.64], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": ()}, "resnet.blocks"),
        ({"input_mean": (1, 2, 3)}, r"each of the 1 channels, got \(1, 2, 3\) and 16"),
        ({"stem": "tiny"}, "stem must be .*got 'tiny'"),
    ],
)
def test_bad_arguments_are_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        small(**arguments)
