"""A small U-Net (Ronneberger et al. 2015), and images of disks and squares in noise for it."""

from collections.abc import Sequence

import gin
import keras
import numpy as np

import ddl


@gin.register
def unet(input_shape: Sequence[int], num_classes: int, widths: Sequence[int]) -> keras.Model:
    """Builds a U-Net with padded convolutions, so that the logits have the size of the image.

    Each level halves height and width of the one above; `widths` are the filters of the levels.
    """
    inputs = x = keras.Input(tuple(input_shape), name="image")
    skipped = []
    for level, width in enumerate(widths):
        x = convolutions(keras.layers.MaxPooling2D()(x) if level else x, width)
        skipped.append(x)
    for width, shortcut in zip(widths[-2::-1], skipped[-2::-1], strict=True):
        x = keras.layers.Conv2DTranspose(width, 2, 2)(x)
        x = convolutions(keras.layers.Concatenate()([shortcut, x]), width)
    return keras.Model(inputs, keras.layers.Conv2D(num_classes, 1, name="logits")(x), name="unet")


def convolutions(x: keras.KerasTensor, width: int) -> keras.KerasTensor:
    """Adds two convolutions of 3×3 with ReLU."""
    for _ in range(2):
        x = keras.layers.Conv2D(width, 3, 1, "same", kernel_initializer="he_normal")(x)
        x = keras.layers.ReLU()(x)
    return x


@gin.register
def disks_and_squares(n: int, seed: int, size: int = 16) -> ddl.data.Source:
    """Draws n noisy images of one disk and one square each, and the class of each pixel."""
    random = np.random.default_rng(seed)
    row, column = np.mgrid[:size, :size]
    labels = np.zeros((n, size, size), np.int32)
    for label in labels:
        (y, x), (top, left) = random.integers(3, size - 3, 2), random.integers(0, size - 5, 2)
        label[(row - y) ** 2 + (column - x) ** 2 <= 9] = 1
        label[top : top + 5, left : left + 5] = 2
    images = (labels > 0) + random.normal(0, 0.3, labels.shape)
    return ddl.data.Source({"image": images[..., None].astype(np.float32), "label": labels})
