"""Cross-entropy of integer labels."""

import math

import tensorflow as tf

from ddl.distribution.path import path_of


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the cross-entropy of each example.

    Args:
      labels: int64 [batch]. Labels outside of the classes give NaN on a GPU, and elsewhere an error
        of TensorFlow.
      logits: float32 or float64 [batch, classes].

    Returns:
      [batch], in the dtype of the logits.
    """
    if logits.dtype == tf.float64 and not path_of().has_float64_losses:
        return _of_log_softmax(labels, logits)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def _of_log_softmax(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the same, up to rounding, by operations that have float64 kernels for GPUs."""
    is_own = tf.one_hot(labels, tf.shape(logits)[-1], True, False, dtype=tf.bool)
    # tf.where, not a product: other logits may be -∞.
    own = tf.where(is_own, tf.nn.log_softmax(logits), tf.zeros([], logits.dtype))
    nan = tf.constant(math.nan, logits.dtype)
    return tf.where(tf.reduce_any(is_own, axis=-1), -tf.reduce_sum(own, axis=-1), nan)
