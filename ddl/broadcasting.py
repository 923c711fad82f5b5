"""Broadcasting from the left: weights and masks of examples meet values of more dimensions."""

import keras
import tensorflow as tf


def broadcasts(values: tf.TensorShape, to: tf.TensorShape) -> bool:
    """Whether values of one shape broadcast to another from the left; unknown sizes may."""
    if values.rank is None or to.rank is None or values.rank > to.rank:
        return False
    return all(v in (1, t) or None in (v, t) for v, t in zip(values, to, strict=False))


def with_rank(values: tf.Tensor, rank: int) -> tf.Tensor:
    """The same values with dimensions of one after their own, `rank` dimensions in all."""
    return tf.reshape(values, [*keras.ops.shape(values), *[1] * (rank - len(values.shape))])
