"""Crops against references in numpy, given the draws."""

import math

import numpy as np
import pytest

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
    """The first of the drawn crops that fits, or else the first one, cut to the image."""
    sizes = []
    for area, shape, _, _ in draws.astype(float):
        area = (scale[0] + (scale[1] - scale[0]) * area) * height * width
        shape = math.exp(math.log(ratio[0]) + shape * math.log(ratio[1] / ratio[0]))
        sizes.append((round(math.sqrt(area / shape)), round(math.sqrt(area * shape))))
    fits = [1 <= rows <= height and 1 <= columns <= width for rows, columns in sizes]
    chosen = fits.index(True) if any(fits) else 0
    rows, columns = min(max(sizes[chosen][0], 1), height), min(max(sizes[chosen][1], 1), width)
    _, _, y, x = draws[chosen].astype(float)
    return int(y * (height - rows + 1)), int(x * (width - columns + 1)), rows, columns


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
    of_bytes = ddl.layers.RandomResizedCrop(6, 5)(IMAGES, training=False).numpy()
    whole = np.round([cropped(i, 0, 0, 9, 7, 6, 5) for i in IMAGES])
    assert of_bytes.dtype == np.uint8
    assert abs(of_bytes - whole).max() <= 1  # a rounding of .5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ddl.layers.RandomResizedCrop(0, 4), "at least 1 pixel, got 0 and 4"),
        (lambda: ddl.layers.RandomResizedCrop(4, 4, (0.5, 0.2)), "scale must be two rising"),
        (lambda: ddl.layers.RandomResizedCrop(4, 4, ratio=(0, 1)), "ratio must be two rising"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
