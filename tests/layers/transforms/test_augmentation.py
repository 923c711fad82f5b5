import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import microbatch

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 6, 5, 3)).astype("u1")
LAYERS = {
    "flip": (keras.layers.RandomFlip, {"mode": "horizontal_and_vertical"}),
    "shift": (ddl.layers.RandomShift, {"height": 2, "width": 1}),
    "cutout": (ddl.layers.Cutout, {"size": 3}),
    "brightness": (keras.layers.RandomBrightness, {"factor": 0.1}),
    "contrast": (keras.layers.RandomContrast, {"factor": 0.5}),
    "resized crop": (ddl.layers.RandomResizedCrop, {"height": 6, "width": 5}),
    "colours": (ddl.layers.ColorJitter, {}),
    "rand augment": (ddl.layers.RandAugment, {}),
}
ROUNDED = (keras.layers.RandomContrast, ddl.layers.RandomResizedCrop, ddl.layers.ColorJitter)
every_layer = pytest.mark.parametrize(
    ("layer_class", "arguments"), LAYERS.values(), ids=LAYERS.keys()
)


def augmented(layer, images=IMAGES, first_row=0, batch=3) -> np.ndarray:
    with microbatch(first_row, len(images), batch=batch).forward():
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


def test_flips():
    across = augmented(keras.layers.RandomFlip("horizontal"))
    kept = (across == IMAGES).all(axis=(1, 2, 3))
    flipped = (across == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (kept | flipped).all()
    assert 0.25 < flipped.mean() < 0.75
    down = augmented(keras.layers.RandomFlip("vertical"))
    assert ((down == IMAGES) | (down == IMAGES[:, ::-1])).all(axis=(1, 2, 3)).all()


def test_shifts_by_whole_pixels_each_way_and_zeros_come_in():
    moved = augmented(ddl.layers.RandomShift(2, 1))
    padded = np.pad(IMAGES, [(0, 0), (2, 2), (1, 1), (0, 0)])
    found = set()
    for image, source in zip(moved, padded, strict=True):
        crops = {(y, x): source[y : y + 6, x : x + 5] for y in range(5) for x in range(3)}
        (place,) = [place for place, crop in crops.items() if (crop == image).all()]
        found.add(place)
    assert len(found) > 10


def test_cuts_a_square_out():
    ones = np.ones([64, 6, 5, 3], "f4")
    holes = augmented(ddl.layers.Cutout(3), ones)[..., 0] == 0
    sizes = holes.sum(axis=(1, 2))
    assert sizes.max() == 9
    assert sizes.min() >= 4  # the centre is in the image
    # A rectangle each: as many as rows times columns that are touched.
    np.testing.assert_array_equal(sizes, holes.any(1).sum(1) * holes.any(2).sum(1))


WIDE = {"value_range": (-1000.0, 1000.0)}  # so that nothing is clipped


def test_brightness_and_contrast():
    images = IMAGES.astype("f4")
    change = augmented(keras.layers.RandomBrightness(0.015, **WIDE), images) - images
    np.testing.assert_allclose(change, change[:, :1, :1, :1] * np.ones_like(change), atol=1e-3)
    assert -30 <= change.min() < -20 < 20 < change.max() <= 30
    mean = images.mean(axis=(1, 2), keepdims=True)
    far = abs(images - mean) > 10
    contrasted = augmented(keras.layers.RandomContrast(0.5, **WIDE), images)
    ratio = (contrasted - mean)[far] / (images - mean)[far]
    assert 0.5 - 1e-3 <= ratio.min() < 0.6 < 1.4 < ratio.max() <= 1.5 + 1e-3


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_values_stay_in_their_range(dtype):
    for layer in (keras.layers.RandomBrightness(0.9), keras.layers.RandomContrast(1.0)):
        changed = augmented(layer, IMAGES.astype(dtype))
        assert 0 <= changed.min() < changed.max() <= 255


@every_layer
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_images_in_half_precision(layer_class, arguments, dtype):
    # A sum over such an image is beyond the largest float16.
    images = tf.cast(np.random.default_rng(0).integers(0, 256, (4, 224, 224, 1)), dtype)
    half = augmented(layer_class(**arguments), images)
    single = augmented(layer_class(**arguments), tf.cast(images, tf.float32))
    assert half.dtype == images.dtype.as_numpy_dtype
    np.testing.assert_array_equal(half, tf.cast(single, dtype))


def test_integers_end_at_the_limits_of_their_dtype():
    # tf.cast wraps around in some places of a tensor and not in others.
    images = np.full([7, 3, 3, 1], 100, np.int8)
    changed = augmented(keras.layers.RandomBrightness(1.0, value_range=(0, 255)), images)
    assert changed.max() == 127
    assert changed.min() == 0


BY_MOVING = {name: LAYERS[name] for name in ("flip", "shift")}


@pytest.mark.parametrize(("layer_class", "arguments"), BY_MOVING.values(), ids=BY_MOVING.keys())
@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_are_moved_exactly(layer_class, arguments, dtype):
    """As their bytes."""
    images = np.random.default_rng(0).integers(
        np.iinfo(dtype).min, np.iinfo(dtype).max, (64, 6, 5, 3), dtype, endpoint=True
    )
    marks = np.arange(1, 1 + 6 * 5).reshape(1, 6, 5, 1) + np.zeros((64, 1, 1, 3))
    moved = augmented(layer_class(**arguments), images)
    from_pixel = augmented(layer_class(**arguments), marks.astype("f4")).astype(int)[..., 0]
    assert moved.dtype == dtype
    assert (moved != images).any()
    pixels = np.pad(images.reshape(64, -1, 3), [(0, 0), (1, 0), (0, 0)])  # 0 is no pixel
    expected = [of_image[places] for of_image, places in zip(pixels, from_pixel, strict=True)]
    np.testing.assert_array_equal(moved, expected)


@pytest.mark.parametrize(("layer_class", "arguments"), BY_MOVING.values(), ids=BY_MOVING.keys())
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_integers_give_no_alarm_of_a_check_for_nan(layer_class, arguments, dtype):
    """Their bits would be NaN in a float."""
    nan = {"uint16": 0x7E00, "int32": 0x7FC00000, "int64": 0x7FF8000000000000}[dtype]
    images = np.full([8, 6, 5, 3], nan, dtype)
    tf.debugging.enable_check_numerics()
    try:
        moved = augmented(layer_class(**arguments), images)
    finally:
        tf.debugging.disable_check_numerics()
    assert set(np.unique(moved)) <= {0, nan}


def test_a_shift_carries_no_infinity_over():
    images = np.full([8, 6, 5, 1], np.inf, "f4")
    assert set(np.unique(augmented(ddl.layers.RandomShift(2, 1), images))) == {0.0, np.inf}


@every_layer
def test_images_of_unknown_size_and_compiled_ones(layer_class, arguments):
    """Compiled, values are rounded in another order and a rounded one may be the next."""
    layer, whole = layer_class(**arguments), augmented(layer_class(**arguments))

    def change(images):
        with microbatch(rows=64).forward():
            return layer(images, training=True)

    unknown = tf.TensorSpec([64, None, None, 3], tf.uint8)
    np.testing.assert_array_equal(tf.function(change, input_signature=[unknown])(IMAGES), whole)
    by_xla = tf.function(change, jit_compile=True)(IMAGES).numpy()
    different = np.abs(by_xla.astype(int) - whole)
    if layer_class is ddl.layers.RandAugment:  # a second operation may amplify the difference
        assert (different > 1).mean() < 0.01
    else:
        assert (different <= (layer_class in ROUNDED)).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.layers.RandomFlip("sideways"), "mode must be .*got 'sideways'"),
        (lambda: ddl.layers.RandomShift(-1, 0), "must be at least 0 pixels, got -1 and 0"),
        (lambda: ddl.layers.Cutout(0), "Cutout.size must be at least 1 pixel, got 0"),
        (lambda: keras.layers.RandomContrast(2.0), "factor must be from 0 to 1, got 2.0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_augmentation_may_be_part_of_a_model():
    inputs = keras.Input((6, 5, 3))
    model = keras.Model(inputs, keras.layers.RandomFlip()(inputs))
    with microbatch(rows=64).forward():
        assert (model(tf.cast(IMAGES, tf.float32), training=True).numpy() != IMAGES).any()
