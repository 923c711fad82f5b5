"""Left-aligned broadcasting of example weights and masks to values of higher rank."""

import keras
import tensorflow as tf


def broadcasts(values: tf.TensorShape, to: tf.TensorShape) -> bool:
    """Returns whether one shape broadcasts to another, aligned left; unknown sizes match any."""
    if values.rank is None or to.rank is None or values.rank > to.rank:
        return False
    return all(v in (1, t) or None in (v, t) for v, t in zip(values, to, strict=False))


def with_rank(values: tf.Tensor, rank: int) -> tf.Tensor:
    """Appends dimensions of size 1 until the values have `rank` dimensions."""
    return tf.reshape(values, [*keras.ops.shape(values), *[1] * (rank - len(values.shape))])
