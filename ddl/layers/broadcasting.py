"""Masks and weights of examples: left-aligned broadcasting, and entries that are left out."""

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


def kept_or_zero(inputs: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """Returns the kept entries, and zero for the others, even if they are infinite.

    Both forms have the same bits. TensorFlow has no GPU kernel of multiply_no_nan for bfloat16. In
    the other dtypes tf.where is slower on a CPU, up to seven times in float16, and on a GPU
    TensorFlow's choice of layouts fails for the whole graph at the scalar in its gradient.

    Args:
      inputs: Floating-point, of any shape.
      kept: bool, of a shape that broadcasts to that of `inputs`.
    """
    if inputs.dtype == tf.bfloat16:
        return tf.where(kept, inputs, tf.zeros([], inputs.dtype))
    return tf.math.multiply_no_nan(inputs, tf.cast(kept, inputs.dtype))
