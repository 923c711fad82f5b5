"""Sparse gradients that hold each row once."""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def merge_duplicates(gradient: Gradient) -> Gradient:
    """Returns a sparse gradient with duplicate rows added up, and a dense gradient unchanged.

    Several replicas, or several examples, may give rows for the same index. These rows must be
    added before the norm or an optimizer such as Adam squares them; else the result would depend on
    the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def in_pairs(
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], one: Gradient, other: Gradient
) -> Gradient:
    """Returns a function of each pair of entries of two gradients of one variable.

    The result is sparse if both gradients are, and holds each row once.

    Args:
      function: Takes two tensors of one shape; gives 0 for two zeros.
      one: The first gradient.
      other: The second gradient.
    """
    if not isinstance(one, tf.IndexedSlices) or not isinstance(other, tf.IndexedSlices):
        return function(tf.convert_to_tensor(one), tf.convert_to_tensor(other))
    # The one loss may look rows up by int32 ids, the other by int64 ids.
    of_both = [tf.cast(gradient.indices, tf.int64) for gradient in (one, other)]
    indices, segments = tf.unique(tf.concat(of_both, axis=0))
    number = tf.shape(one.indices)[0]
    both = [
        tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(indices)[0])
        for gradient, places in ((one, segments[:number]), (other, segments[number:]))
    ]
    return tf.IndexedSlices(function(*both), indices, one.dense_shape)
