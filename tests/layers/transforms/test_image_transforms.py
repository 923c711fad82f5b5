"""Crops, colours and RandAugment against references in numpy, given the draws."""

import colorsys
import math

import numpy as np
import pytest
import tensorflow as tf
from ddl.layers.transforms.rand_augment import OPERATIONS

import ddl
from ddl.errors import ConfigError
from tests.layers.given_draws import GivenDraws

IMAGES = np.random.default_rng(3).integers(0, 256, (40, 9, 7, 3)).astype("u1")


def cropped(image, top, left, rows, columns, height, width):
    """Resizes a crop by bilinear interpolation between the centres of its pixels."""
    crop = image[top : top + rows, left : left + columns].astype(float)
    result = np.zeros((height, width, image.shape[-1]))
    for y in range(height):
        for x in range(width):
            at = [(y + 0.5) * rows / height - 0.5, (x + 0.5) * columns / width - 0.5]
            at = [min(max(at[0], 0), rows - 1), min(max(at[1], 0), columns - 1)]
            low = [math.floor(each) for each in at]
            high = [min(low[0] + 1, rows - 1), min(low[1] + 1, columns - 1)]
            v, u = at[0] - low[0], at[1] - low[1]
            upper = (1 - u) * crop[low[0], low[1]] + u * crop[low[0], high[1]]
            lower = (1 - u) * crop[high[0], low[1]] + u * crop[high[0], high[1]]
            result[y, x] = (1 - v) * upper + v * lower
    return result


def chosen_crop(draws, height, width, scale, ratio):
    """The first of the drawn crops that fits, or else the central one."""
    for area, shape, y, x in draws.astype(float):
        area = (scale[0] + (scale[1] - scale[0]) * area) * height * width
        shape = math.exp(math.log(ratio[0]) + shape * math.log(ratio[1] / ratio[0]))
        rows, columns = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
        if 1 <= rows <= height and 1 <= columns <= width:
            top, left = int(y * (height - rows + 1)), int(x * (width - columns + 1))
            return top, left, rows, columns
    shape = min(max(width / height, ratio[0]), ratio[1])
    rows, columns = min(height, round(width / shape)), min(width, round(height * shape))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (3.0, 4.0)], ids=["fits", "rarely fits"])
def test_resized_crops(monkeypatch, ratio):
    scale = (0.08, 1.0)
    draws = GivenDraws(monkeypatch)
    layer = ddl.layers.RandomResizedCrop(6, 5, scale, ratio)
    found = layer(IMAGES.astype("f4"), training=True).numpy()
    (drawn,) = draws.drawn
    crops = [chosen_crop(each, 9, 7, scale, ratio) for each in drawn]
    expected = [cropped(i, *c, 6, 5) for i, c in zip(IMAGES, crops, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    central = sum(crop == chosen_crop(drawn[0][:0], 9, 7, scale, ratio) for crop in crops)
    assert central > 5 if ratio[0] > 1 else central < 5
    of_bytes = ddl.layers.RandomResizedCrop(6, 5)(IMAGES, training=False).numpy()
    whole = np.round([cropped(i, 0, 0, 9, 7, 6, 5) for i in IMAGES])
    assert of_bytes.dtype == np.uint8
    assert abs(of_bytes - whole).max() <= 1  # a rounding of .5


def luma(colours):
    return colours @ [0.299, 0.587, 0.114]


def test_colours(monkeypatch):
    draws = GivenDraws(monkeypatch)
    layer = ddl.layers.ColorJitter(0.8, 0.7, 0.6, 0.2)
    found = layer(IMAGES.astype("f4"), training=True).numpy()
    (drawn,) = draws.drawn
    for image, result, draw in zip(IMAGES, found, 2.0 * drawn - 1, strict=True):
        x = np.clip(image / 255 * (1 + 0.8 * draw[0]), 0, 1)
        mean = luma(x).mean()
        x = np.clip(mean + (1 + 0.7 * draw[1]) * (x - mean), 0, 1)
        grey = luma(x)[..., np.newaxis]
        x = np.clip(grey + (1 + 0.6 * draw[2]) * (x - grey), 0, 1)
        hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in x.reshape(-1, 3)]
        rgb = [colorsys.hsv_to_rgb((h + 0.2 * draw[3]) % 1, s, v) for h, s, v in hsv]
        np.testing.assert_allclose(result, 255 * np.reshape(rgb, x.shape), atol=2e-2)


def test_colours_of_grey_images():
    grey = IMAGES[..., :1]
    found = ddl.layers.ColorJitter(0, 0, 0.9, 0.5)(grey, training=True).numpy()
    np.testing.assert_array_equal(found, grey)


def equalized(channel):
    counts = np.bincount(channel.ravel(), minlength=256)
    step = (counts.sum() - counts[channel.max()]) // 255
    if not step:
        return channel
    before = np.cumsum(counts) - counts
    return np.minimum((step // 2 + before) // step, 255)[channel]


def stretched(channel):
    low, high = int(channel.min()), int(channel.max())
    return channel if low == high else np.round((channel - low) * (255 / (high - low)))


def away_from(other, image, factor):
    return np.clip(np.round(other + factor * (image - other)), 0, 255)


def of_each_channel(function):
    return lambda image, *_: np.stack([function(image[..., c]) for c in range(3)], axis=-1)


def moving(place):
    """Takes pixels from the place, (row, column), at the centre of each; 128 outside."""

    def move(image, sign, part):
        height, width, _ = image.shape
        result = np.full(image.shape, 128.0)
        for y in range(height):
            for x in range(width):
                row, column = place(y + 0.5, x + 0.5, sign, part, height, width)
                row, column = math.floor(row), math.floor(column)
                if 0 <= row < height and 0 <= column < width:
                    result[y, x] = image[row, column]
        return result

    return move


def rotated(y, x, sign, part, height, width):
    angle = math.radians(sign * 30 * part)
    y, x = y - height / 2, x - width / 2
    return (
        math.cos(angle) * y + math.sin(angle) * x + height / 2,
        math.cos(angle) * x - math.sin(angle) * y + width / 2,
    )


def smooth(image):
    result = image.copy()
    for y in range(1, image.shape[0] - 1):
        for x in range(1, image.shape[1] - 1):
            around = image[y - 1 : y + 2, x - 1 : x + 2].sum(axis=(0, 1))
            result[y, x] = np.round((around + 4 * image[y, x]) / 13)
    return result


def grey(image):
    return np.round(luma(image))[..., np.newaxis]


REFERENCES = {
    "identity": lambda image, sign, part: image,
    "autocontrast": of_each_channel(stretched),
    "equalize": of_each_channel(lambda channel: equalized(channel.astype(int))),
    "rotate": moving(rotated),
    "solarize": lambda image, sign, part: np.where(image < 256 * (1 - part), image, 255 - image),
    "color": lambda image, sign, part: away_from(grey(image), image, 1 + sign * 0.9 * part),
    "posterize": lambda image, sign, part: image - image % 2 ** round(4 * part),
    "contrast": lambda image, sign, part: away_from(
        np.round(grey(image).mean()), image, 1 + sign * 0.9 * part
    ),
    "brightness": lambda image, sign, part: away_from(0, image, 1 + sign * 0.9 * part),
    "sharpness": lambda image, sign, part: away_from(smooth(image), image, 1 + sign * 0.9 * part),
    "shear_x": moving(lambda y, x, sign, part, h, w: (y, x + sign * 0.3 * part * y)),
    "shear_y": moving(lambda y, x, sign, part, h, w: (y + sign * 0.3 * part * x, x)),
    "translate_x": moving(lambda y, x, sign, part, h, w: (y, x + round(sign * 0.45 * part * w))),
    "translate_y": moving(lambda y, x, sign, part, h, w: (y + round(sign * 0.45 * part * h), x)),
}

# Large enough for equalize to have a step.
LARGE = np.random.default_rng(4).normal(120, 40, (28, 24, 22, 3)).clip(20, 230).round()


@pytest.mark.parametrize("magnitude", [9, 3.5])
def test_each_operation_of_rand_augment(magnitude):
    """On two images each, in either direction."""
    operation = np.repeat(np.arange(14.0), 2).astype("f4")
    sign = np.tile([-1.0, 1.0], 14).astype("f4")
    layer = ddl.layers.RandAugment(magnitude=magnitude)
    found = layer.applied(tf.constant(LARGE, tf.float32), tf.constant(operation), tf.constant(sign))
    for image, number, side, result in zip(LARGE, operation, sign, found.numpy(), strict=True):
        name = OPERATIONS[int(number)]
        expected = REFERENCES[name](image, side, magnitude / 10)
        different = np.abs(result - expected)
        # Rounding moves some values by one level, and places at the edges of pixels to the next.
        assert (different > 0).mean() < 0.03, name
        assert (different > 1).mean() < 0.01, name
        assert name in ("identity", "posterize") or (result != image).mean() > 0.05, name


def test_rand_augment_draws_operations_of_each_image(monkeypatch):
    draws = GivenDraws(monkeypatch)
    layer = ddl.layers.RandAugment(2, 5)
    found = layer(IMAGES, training=True).numpy()
    (drawn,) = draws.drawn
    assert drawn.shape == (40, 4)
    for image, result, draw in zip(IMAGES, found, drawn, strict=True):
        expected = image.astype(float)
        for which, side in draw.reshape(2, 2):
            name = OPERATIONS[int(which * 14)]
            expected = REFERENCES[name](expected, 1 if side >= 0.5 else -1, 0.5)
        # A level that rounds otherwise in the first operation may be amplified by the second.
        assert (np.abs(result - expected) > 2).mean() < 0.05


def test_rand_augment_in_another_range():
    of_bytes = ddl.layers.RandAugment(2, 9, seed=1)(IMAGES, training=True).numpy()
    layer = ddl.layers.RandAugment(2, 9, value_range=(-1, 1), seed=1)
    of_floats = layer((IMAGES / 127.5 - 1).astype("f4"), training=True).numpy()
    np.testing.assert_allclose((of_floats + 1) * 127.5, of_bytes, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ddl.layers.RandomResizedCrop(0, 4), "at least 1 pixel, got 0 and 4"),
        (lambda: ddl.layers.RandomResizedCrop(4, 4, (0.5, 0.2)), "scale must be two rising"),
        (lambda: ddl.layers.RandomResizedCrop(4, 4, ratio=(0, 1)), "ratio must be two rising"),
        (lambda: ddl.layers.ColorJitter(hue=0.6), "hue at most 0.5"),
        (
            lambda: ddl.layers.ColorJitter()(IMAGES[..., :2], training=True),
            "1 or 3 channels, got 2",
        ),
        (lambda: ddl.layers.RandAugment(0), "num_layers must be at least 1"),
        (lambda: ddl.layers.RandAugment(magnitude=11), "magnitude must be from 0 to 10, got 11"),
        (lambda: ddl.layers.RandAugment()(IMAGES[..., :2], training=True), "1 or 3 channels"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
