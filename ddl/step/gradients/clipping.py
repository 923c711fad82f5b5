"""Clipping of the gradient of the global batch, by its norm or by value.

Each optimizer may have a limit of its own (`clips_by_name`). `ddl.step.verbs.applying` clips after
the penalties are added, and before the optimizers update.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from ddl.devices.packing import Packed, norm
from ddl.errors import ConfigError
from ddl.optimizers.named import ONLY
from ddl.step.gradients.values import Gradient, each, multiply, packs, values_of, widest


@dataclasses.dataclass(frozen=True)
class Clip:
    """Limits of a gradient that is applied.

    Attributes:
      norm: Largest global norm, or None.
      value: Largest absolute value of an entry, or None.

    Raises:
      ConfigError: If a limit is not positive, or both are given.
    """

    norm: float | None
    value: float | None

    def __post_init__(self) -> None:
        for name, macro, limit in (
            ("clip_norm", "CLIP_NORM", self.norm),
            ("clip_value", "Trainer.clip_value", self.value),
        ):
            if limit is not None and not limit > 0:
                raise ConfigError(
                    f"Trainer.{name} must be greater than 0, or None, got {limit}. Set "
                    f"{macro} = None to leave gradients unclipped."
                )
        if self.norm is not None and self.value is not None:
            raise ConfigError(
                f"clip_norm and clip_value exclude each other, got clip_norm = {self.norm} "
                f"and clip_value = {self.value}. Set one of them to None."
            )


Limit: TypeAlias = float | Mapping[str, float | None] | None
"""A limit of all gradients, or that of each optimizer by its name; None: no limit."""


def clips_by_name(norm: Limit, value: Limit, optimizers: Sequence[str]) -> dict[str, Clip]:
    """Returns the limits of each optimizer's gradients.

    Args:
      norm: `Trainer.clip_norm`.
      value: `Trainer.clip_value`.
      optimizers: Names of the optimizers.

    Raises:
      ConfigError: If a limit is not positive, or names no optimizer, or leaves one out.
    """
    limits = []
    for name, limit in (("clip_norm", norm), ("clip_value", value)):
        if not isinstance(limit, Mapping):
            limits.append(dict.fromkeys(optimizers, limit))
            continue
        if limit.keys() != set(optimizers):
            known = "only one, without a name" if list(optimizers) == [ONLY] else optimizers
            raise ConfigError(
                f"Trainer.{name} gives limits for {', '.join(limit)}, but the Trainer has the "
                f"optimizers {known if isinstance(known, str) else ', '.join(known)}. Give one "
                "number, or one for each optimizer; None means no limit."
            )
        limits.append(dict(limit))
    return {name: Clip(limits[0][name], limits[1][name]) for name in optimizers}


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


def clip_by_value(gradients: Sequence[Gradient], clip_value: float) -> list[Gradient]:
    """Clips each entry to [-clip_value, clip_value].

    Args:
      gradients: As in `clip_by_global_norm`.
      clip_value: The largest absolute value allowed.
    """
    return each(gradients, lambda values: tf.clip_by_value(values, -clip_value, clip_value))
