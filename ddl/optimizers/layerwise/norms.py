"""Norms of layers, from which LARS and LAMB compute the rate of each layer."""

import tensorflow as tf

from ddl.errors import ConfigError


def or_one(ratio: tf.Tensor, *norms: tf.Tensor) -> tf.Tensor:
    """Returns the ratio, or 1 where one of the norms is zero."""
    return tf.where(tf.reduce_all(tf.stack(norms) > 0), ratio, tf.ones_like(ratio))


def or_ones(ratios: tf.Tensor, norms: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Returns ratios, [n], or 1 where one of two norms is zero."""
    return tf.where(tf.minimum(norms, others) > 0, ratios, tf.ones_like(ratios))


def check_not_negative(optimizer: str, **numbers: float) -> None:
    """Raises ConfigError unless each argument of an optimizer is at least 0."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ConfigError(f"{optimizer}.{name} must be at least 0, got {number}.")


def norm(values: tf.Tensor) -> tf.Tensor:
    """Returns the Euclidean norm [], in at least float32."""
    return tf.norm(tf.cast(values, tf.float32) if values.dtype.size < 4 else values)
