"""Data for fine-tuning: few digits, labelled as even or odd."""

from typing import Literal

import gin
import numpy as np

import ddl


@gin.register
def even_or_odd(
    split: Literal["train", "test"], per_digit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of digits, and whether each is odd.

    Args:
      split: "train" or "test".
      per_digit: Number of images of each digit, the first ones; None for all.
    """
    images, labels = ddl.data.digits(split)
    places = np.concatenate([np.flatnonzero(labels == digit)[:per_digit] for digit in range(10)])
    return images[places], labels[places] % 2
