"""Clipping of the gradient of the global batch by its norm.

Each optimizer may have a limit of its own (`clips_by_name`). `ddl.step.applying` clips after
the penalties are added, and before the optimizers update.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.groups import ONLY
from ddl.step.gradients.values import Gradient, multiply, packs, values_of, widest
from ddl.step.packing import Packed, norm

Limit: TypeAlias = float | Mapping[str, float | None] | None
"""A limit of all gradients, or that of each optimizer by its name; None: no limit."""


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
        known = "only one, without a name" if list(optimizers) == [ONLY] else ", ".join(optimizers)
        raise ConfigError(
            f"Trainer.clip_norm gives limits for {', '.join(limits)}, but the Trainer has the "
            f"optimizers {known}. Give one number, or one for each optimizer; None means no limit."
        )
    for one in limits.values():
        if one is not None and not one > 0:
            raise ConfigError(
                f"Trainer.clip_norm must be greater than 0, or None, got {one}. Set "
                "CLIP_NORM = None to leave gradients unclipped."
            )
    return dict(limits)


def clip_by_global_norm(
    gradients: Sequence[Gradient], clip_norm: float, squared: tf.Tensor | None = None
) -> tuple[list[Gradient], tf.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `clip_norm`.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Args:
      gradients: The gradients of the global batch, after the all-reduce. Sparse gradients hold
        each row once (`merge_duplicates`).
      clip_norm: The largest norm allowed.
      squared: The squared global norm; None computes that of all gradients.

    Returns:
      The clipped gradients, and the norm before clipping: a scalar in the widest dtype of
      the gradients.
    """
    own = global_norm(gradients) if squared is None else tf.sqrt(squared)
    # Below the limit the factor is exactly one, so clipping rounds nothing.
    limit = tf.constant(clip_norm, own.dtype)  # tf.cast rounds to float32 first
    return multiply(gradients, limit / tf.maximum(own, limit)), own


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the global norm: a scalar in the widest dtype of the gradients.

    Args:
      gradients: As in `clip_by_global_norm`.
    """
    values = [values_of(gradient) for gradient in gradients]
    wide = widest(gradients)
    if not packs() or any(value.dtype != wide or wide.size < 4 for value in values):
        return tf.sqrt(squared_norm(gradients))
    # The square root is taken in the kernel that adds.
    norms = [norm(buffer) for buffer in Packed(values, shared=True).buffers]
    return norms[0] if len(norms) == 1 else norm(tf.stack(norms))


def squared_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the squared global norm: a scalar in the widest dtype of the gradients.

    Args:
      gradients: As in `clip_by_global_norm`.
    """
    wide = widest(gradients)
    values = [values_of(gradient) for gradient in gradients]
    if packs():
        values = Packed(values, shared=True).buffers
    halves = [tf.cast(tf.nn.l2_loss(value), wide) for value in values]
    return 2 * (halves[0] if len(halves) == 1 and packs() else tf.reduce_sum(tf.stack(halves)))
