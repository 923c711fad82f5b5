"""Images for a small U-Net (Ronneberger et al. 2015) that finds disks and squares in noise."""

import gin
import numpy as np

import ddl


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
