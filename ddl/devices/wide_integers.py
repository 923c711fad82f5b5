"""Integers that a GPU holds as int64, although their dtype is narrower.

TensorFlow keeps int32 in host memory even for operations on a GPU, so arrays of integers lie there
as int64 and are cast back after the gather. Who needs int64 again would pay for a second cast.
"""

import tensorflow as tf

_WIDE = "_ddl_as_int64"


def narrowed(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts int64 values to a narrower integer dtype that holds all of them."""
    narrow = tf.cast(values, dtype)
    setattr(narrow, _WIDE, values)
    return narrow


def as_int64(values: tf.Tensor) -> tf.Tensor:
    """Casts integers to int64; returns the very values that `narrowed` was given, if it made them.

    Args:
      values: Integers of any dtype and shape.
    """
    wide: tf.Tensor | None = getattr(values, _WIDE, None)
    return tf.cast(values, tf.int64) if wide is None else wide
