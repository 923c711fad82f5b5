import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import microbatch

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 6, 5, 3)).astype("u1")
LAYERS = {
    "shift": (ddl.layers.RandomShift, {"height": 2, "width": 1}),
    "resized crop": (ddl.layers.RandomResizedCrop, {"height": 6, "width": 5}),
}
every_layer = pytest.mark.parametrize(
    ("layer_class", "arguments"), LAYERS.values(), ids=LAYERS.keys()
)


def augmented(layer, images=IMAGES, first_row=0, batch=3) -> np.ndarray:
    current = microbatch(first_row, len(images), batch=batch)
    with current.forward():
        return layer(images, training=True).numpy()


@every_layer
def test_replicas_change_images_as_one_device_does(layer_class, arguments):
    layer = layer_class(**arguments)
    whole = augmented(layer)
    assert whole.dtype == np.uint8
    assert (whole != IMAGES).any(axis=(1, 2, 3)).mean() > 0.5
    np.testing.assert_array_equal(augmented(layer, IMAGES[16:40], first_row=16), whole[16:40])
    assert (augmented(layer, batch=4) != whole).any()


@every_layer
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64", "float16"])
def test_leaves_images_alone_outside_of_training(layer_class, arguments, dtype):
    layer, images = layer_class(**arguments), IMAGES.astype(dtype)
    with microbatch(rows=64).forward():
        np.testing.assert_array_equal(layer(images, training=False), images)
    assert augmented(layer, images).dtype == dtype


@every_layer
def test_outside_of_a_trainer_it_draws_as_a_keras_layer_does(layer_class, arguments):
    layer = layer_class(**arguments, seed=1)
    assert (layer(IMAGES, training=True).numpy() != layer(IMAGES, training=True).numpy()).any()
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert again.get_config() == layer.get_config()


def test_shifts_by_whole_pixels_each_way_and_zeros_come_in():
    moved = augmented(ddl.layers.RandomShift(2, 1))
    padded = np.pad(IMAGES, [(0, 0), (2, 2), (1, 1), (0, 0)])
    found = set()
    for image, source in zip(moved, padded, strict=True):
        crops = {(y, x): source[y : y + 6, x : x + 5] for y in range(5) for x in range(3)}
        (place,) = [place for place, crop in crops.items() if (crop == image).all()]
        found.add(place)
    assert len(found) > 10


@every_layer
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_images_in_half_precision(layer_class, arguments, dtype):
    # A sum over such an image is beyond the largest float16.
    images = tf.cast(np.random.default_rng(0).integers(0, 256, (4, 224, 224, 1)), dtype)
    half = augmented(layer_class(**arguments), images)
    single = augmented(layer_class(**arguments), tf.cast(images, tf.float32))
    assert half.dtype == images.dtype.as_numpy_dtype
    np.testing.assert_array_equal(half, tf.cast(single, dtype))


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32", "int64"])
def test_integers_are_shifted_exactly(dtype):
    """Up to 2^53."""
    layer_class, arguments = LAYERS["shift"]
    limits = max(np.iinfo(dtype).min, -(2**53)), min(np.iinfo(dtype).max, 2**53)
    images = np.random.default_rng(0).integers(*limits, (64, 6, 5, 3), dtype, endpoint=True)
    marks = np.arange(1, 1 + 6 * 5).reshape(1, 6, 5, 1) + np.zeros((64, 1, 1, 3))
    moved = augmented(layer_class(**arguments), images)
    from_pixel = augmented(layer_class(**arguments), marks.astype("f4")).astype(int)[..., 0]
    assert moved.dtype == dtype
    assert (moved != images).any()
    pixels = np.pad(images.reshape(64, -1, 3), [(0, 0), (1, 0), (0, 0)])  # 0 is no pixel
    expected = [of_image[places] for of_image, places in zip(pixels, from_pixel, strict=True)]
    np.testing.assert_array_equal(moved, expected)


def test_a_shift_carries_no_infinity_over():
    images = np.full([8, 6, 5, 1], np.inf, "f4")
    assert set(np.unique(augmented(ddl.layers.RandomShift(2, 1), images))) == {0.0, np.inf}


@every_layer
def test_images_of_unknown_size_and_compiled_ones(layer_class, arguments):
    """Compiled, values are rounded in another order and a rounded one may be the next."""
    layer, whole = layer_class(**arguments), augmented(layer_class(**arguments))

    def change(images):
        current = microbatch(rows=64)
        with current.forward():
            return layer(images, training=True)

    unknown = tf.TensorSpec([64, None, None, 3], tf.uint8)
    np.testing.assert_array_equal(tf.function(change, input_signature=[unknown])(IMAGES), whole)
    by_xla = tf.function(change, jit_compile=True)(IMAGES).numpy()
    different = np.abs(by_xla.astype(int) - whole)
    assert (different <= (layer_class is ddl.layers.RandomResizedCrop)).all()


def test_a_negative_shift():
    with pytest.raises(ConfigError, match="must be at least 0 pixels, got -1 and 0"):
        ddl.layers.RandomShift(-1, 0)
