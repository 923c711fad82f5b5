"""Arithmetic of reduced gradients, as an update applies them: factor, penalties, norm, clip.

Every replica holds the same values. Keras 3 clips before the all-reduce, on each replica's own
share of the gradient.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from ddl.errors import ConfigError

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

Variables: TypeAlias = Sequence[keras.Variable]

Limit: TypeAlias = float | Mapping[str, float | None] | None
"""A limit of all gradients, or that of each optimizer by its name; None: no limit."""


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns the values of a gradient; of a sparse one, those of its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    """Returns a gradient with other values; a sparse one of the same rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def widest(values: Sequence[Gradient]) -> tf.DType:
    """Returns the widest dtype of the values."""
    return max((value.dtype for value in values), key=lambda dtype: dtype.size)


def multiply(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """Multiplies each gradient by a scalar, in the gradient's dtype; sparse ones stay sparse."""
    return [with_values(one, values_of(one) * tf.cast(factor, one.dtype)) for one in gradients]


def add_regularization(gradients: Sequence[Gradient], variables: Variables) -> list[Gradient]:
    """Adds the gradients of the variables' own regularizers, such as L2. Replica context.

    These gradients depend only on the weights, so every replica computes them without an
    all-reduce. They are added once after the all-reduce, so their scale does not depend on the
    number of replicas or microbatches.
    """
    pairs = zip(gradients, penalty_gradients(variables), strict=True)
    return [g if extra is None else tf.convert_to_tensor(g) + extra for g, extra in pairs]


def penalty_gradients(variables: Variables) -> list[tf.Tensor | None]:
    """Returns the gradient of each variable's regularizer; None without one. Replica context."""
    with tf.GradientTape() as tape:
        penalties = [v.regularizer(v) for v in variables if v.regularizer is not None]
    if not penalties:
        return [None] * len(variables)
    return list(tape.gradient(penalties, [v.value for v in variables]))  # of their sum


def squared_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the squared global norm: a scalar in the widest dtype of the gradients, or float32.

    Args:
      gradients: The gradients; sparse ones hold each row once (`ddl.step.rows`).
    """
    widest_dtype = widest(gradients)
    dtype = widest_dtype if widest_dtype.size > 2 else tf.float32  # half precision holds no square
    halves = [tf.nn.l2_loss(tf.cast(values_of(gradient), dtype)) for gradient in gradients]
    return 2 * tf.reduce_sum(tf.stack(halves))


def clip_by_global_norm(
    gradients: Sequence[Gradient], clip_norm: float, squared: tf.Tensor
) -> tuple[list[Gradient], tf.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `clip_norm`.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Args:
      gradients: The gradients of the global batch, as in `squared_norm`.
      clip_norm: The largest norm allowed.
      squared: The squared global norm.

    Returns:
      The clipped gradients, and the norm before clipping: a scalar of the dtype of `squared`.
    """
    norm = tf.sqrt(squared)
    # Below the limit, which may be infinite, the factor is exactly one: clipping rounds nothing.
    limit = tf.constant(clip_norm, norm.dtype)  # tf.cast rounds to float32 first
    return multiply(gradients, tf.minimum(limit / norm, tf.ones_like(norm))), norm


def clips_by_name(limit: Limit, optimizers: Sequence[str]) -> dict[str, float | None]:
    """Returns the largest global norm of each optimizer's gradients; None: no limit.

    Args:
      limit: `Trainer.clip_norm`.
      optimizers: Names of the optimizers.

    Raises:
      ConfigError: If a limit is not positive, or names no optimizer, or leaves one out.
    """
    limits = limit if isinstance(limit, Mapping) else dict.fromkeys(optimizers, limit)
    if limits.keys() != set(optimizers):
        raise ConfigError(
            f"Trainer.clip_norm gives limits for {', '.join(limits)}, but Trainer.optimizer has "
            f"{', '.join(optimizers)}. Give one number, or one for each; None means no limit."
        )
    if wrong := [one for one in limits.values() if one is not None and not one > 0]:
        raise ConfigError(
            f"Trainer.clip_norm must be greater than 0, or None for no limit, got {wrong[0]}."
        )
    return dict(limits)
