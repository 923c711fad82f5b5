"""Histograms with fixed bins, whose counts add up over variables, replicas and updates."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ddl.figures import HISTOGRAM_LIMITS

BINS = len(HISTOGRAM_LIMITS) + 1
"""Number of bins between `ddl.figures.HISTOGRAM_LIMITS` and outside of them."""


def counts_of(values: tf.Tensor, zeros: tf.Tensor | None = None) -> tf.Tensor:
    """Counts values in bins. In a graph, also one that XLA compiles.

    Args:
      values: float32 or float64, of any shape.
      zeros: Number of further values that are 0, int64 []; None for none.

    Returns:
      float64 [BINS].
    """
    places = tf.raw_ops.Bucketize(input=tf.reshape(values, [-1]), boundaries=list(HISTOGRAM_LIMITS))
    none = tf.zeros([0], tf.int32)  # an int64 has no kernel for GPUs
    found = tf.raw_ops.DenseBincount(input=places, size=BINS, weights=none, binary_output=False)
    counts = tf.cast(found, tf.float64)
    if zeros is None:
        return counts
    return counts + tf.one_hot(BINS // 2, BINS, dtype=tf.float64) * tf.cast(zeros, tf.float64)


class Bar(NamedTuple):
    """A bin: its limits and the number of values in it."""

    left: float
    right: float
    number: int


class Histogram:
    """Counts of values in the bins between `ddl.figures.HISTOGRAM_LIMITS`.

    Attributes:
      counts: float64 [BINS].
    """

    def __init__(self, counts: np.ndarray):
        """Keeps the counts."""
        self.counts = counts

    @property
    def total(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    def bars(self) -> list[Bar]:
        """Returns the bins from the first to the last with any value.

        The outermost bins end at twice the outermost limits.
        """
        limits = [2 * HISTOGRAM_LIMITS[0], *HISTOGRAM_LIMITS, 2 * HISTOGRAM_LIMITS[-1]]
        (places,) = np.nonzero(self.counts)
        if not len(places):
            return []
        every = zip(limits[:-1], limits[1:], self.counts, strict=True)
        bars = [Bar(left, right, int(count)) for left, right, count in every]
        return bars[places[0] : places[-1] + 1]
