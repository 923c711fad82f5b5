"""Per-example accuracy and top-k accuracy."""

import tensorflow as tf


def accuracy(
    labels: tf.Tensor, logits: tf.Tensor, cross_entropy: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns 1.0 where the largest logit is the label's, else 0.0.

    Ties go to the first class. A row with a NaN counts as wrong.

    Args:
      labels: integer [batch].
      logits: float [batch, classes].
      cross_entropy: The result of `ddl.tasks.cross_entropy` for them, [batch], which is NaN where a
        row has a NaN or +∞; it takes a reduction less than looking at all logits.

    Returns:
      float32 [batch].
    """
    is_right = tf.equal(tf.argmax(logits, axis=-1), tf.cast(labels, tf.int64))
    if cross_entropy is None:
        return _unless_nan(logits, is_right)
    return _where_not(tf.math.is_nan(cross_entropy), is_right)


def top_k_accuracy(labels: tf.Tensor, logits: tf.Tensor, k: int) -> tf.Tensor:
    """Returns 1.0 where the label is among the `k` largest logits, else 0.0.

    Ties count against the label, so that equal logits for all classes are not counted as right. A
    row with a NaN counts as wrong.

    Args:
      labels: integer [batch].
      logits: float [batch, classes].
      k: Number of largest logits that count.

    Returns:
      float32 [batch].
    """
    own = tf.gather(logits, tf.cast(labels, tf.int64), batch_dims=1)
    at_least = tf.reduce_sum(tf.cast(logits >= own[:, tf.newaxis], tf.float32), axis=-1)
    return _unless_nan(logits, at_least <= k)


def _unless_nan(logits: tf.Tensor, is_right: tf.Tensor) -> tf.Tensor:
    """Returns 1.0 where `is_right`, bool [batch], and the row has no NaN; else 0.0."""
    # Comparisons with NaN are false, so each metric would otherwise need a rule of its own.
    return _where_not(tf.reduce_any(tf.math.is_nan(logits), axis=-1), is_right)


def _where_not(is_nan: tf.Tensor, is_right: tf.Tensor) -> tf.Tensor:
    return tf.where(is_nan, tf.zeros([]), tf.cast(is_right, tf.float32))
