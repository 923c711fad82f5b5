"""Sums in one fixed binary tree, (a + b) + (c + d)."""

from collections.abc import Sequence

import tensorflow as tf


def sum_in_tree(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds neighbours, then neighbouring sums, and so on.

    Equal parts of a longer sequence can be added apart, as on several replicas: the sum of their
    sums has the same bits.

    Args:
      values: Tensors of one shape and dtype; their number is a power of two.
    """
    values = list(values)
    if len(values) & (len(values) - 1):
        raise ValueError(f"The number of values must be a power of two, got {len(values)}.")
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
