"""Sums in one fixed binary tree, (a + b) + (c + d), and what follows them."""

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


def sum_rows_in_tree(rows: tf.Tensor) -> tf.Tensor:
    """Adds the rows of a tensor as `sum_in_tree` adds tensors: [values, …] to […]."""
    return sum_in_tree(tf.unstack(rows))


def exchanged(value: tf.Tensor) -> tf.Tensor:
    """Returns a value of all shards, which the graph optimizer never takes for a constant.

    On a single replica, a value such as the number of rows can be constant, and on several it
    comes from other devices. TensorFlow computes with a constant otherwise: it multiplies by the
    reciprocal of a constant divisor.
    """
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)
