"""Images as PNG files and as characters."""

import numpy as np
import tensorflow as tf

_SMALLEST = 4
_SHADES = " .:-=+*#%@"
_COLUMNS = 32


def is_picture(values: np.ndarray) -> bool:
    """Returns whether these are images [b, height, width, channels] of 1, 3 or 4 channels."""
    return (
        values.ndim == 4
        and values.shape[3] in (1, 3, 4)
        and min(values.shape[1:3]) >= _SMALLEST
        and values.dtype.kind in "uif"
    )


def as_png(images: np.ndarray, columns: int = 8) -> bytes:
    """Returns a PNG with images side by side in rows, separated by lines of one pixel.

    Args:
      images: [b, height, width, channels]. uint8 that reaches the upper half of its range is taken
        as it is; all else is stretched from its least to its greatest value.
      columns: Images in a row.
    """
    pixels = _in_bytes(images)
    count, height, width, channels = pixels.shape
    columns = min(columns, count)
    lines = -(-count // columns)
    grid = np.zeros((lines * (height + 1) - 1, columns * (width + 1) - 1, channels), np.uint8)
    for number, image in enumerate(pixels):
        top, left = number // columns * (height + 1), number % columns * (width + 1)
        grid[top : top + height, left : left + width] = image
    return tf.io.encode_png(grid).numpy()


def as_text(image: np.ndarray, columns: int = _COLUMNS) -> list[str]:
    """Returns an image [height, width, channels] as lines of characters, bright ones as `@`.

    Args:
      image: Stretched from its least to its greatest value.
      columns: Greatest number of characters in a line; larger images are thinned out.
    """
    grey = _stretched(image)[..., :3].mean(axis=2)
    step = max(1, -(-grey.shape[1] // columns))
    # A character is about twice as high as wide.
    thinned = grey[:: 2 * step, ::step] if step > 1 or grey.shape[0] > columns else grey
    levels = (thinned / 256 * len(_SHADES)).astype(int)
    return ["".join(_SHADES[level] for level in row) for row in levels]


def _in_bytes(images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8 and images.max() > np.iinfo(np.uint8).max // 2:
        return images
    return _stretched(images)


def _stretched(images: np.ndarray) -> np.ndarray:
    values = images.astype(np.float64)
    low, high = values.min(), values.max()
    return ((values - low) / ((high - low) or 1.0) * 255).round().astype(np.uint8)
