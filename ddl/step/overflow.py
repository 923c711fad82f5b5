"""Overflow of a gradient: all replicas skip the update, and the loss scale falls.

The check looks at the sum over the replicas, which all of them hold: an infinity on one replica
makes it infinite on all, so they decide the same. A skipped update leaves weights, slots, averages
and moving statistics as they were.

Micikevicius et al. 2018, "Mixed Precision Training".
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from ddl.precision import LossScale
from ddl.step.gradients import Gradient, values_of
from ddl.step.state import TrainingState


def each_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns which gradients hold neither an infinity nor a NaN: bool [gradients]."""
    return tf.stack([tf.reduce_all(tf.math.is_finite(values_of(g))) for g in gradients])


def change_unless_overflow(
    finite: tf.Tensor, change: Callable[[], tf.Tensor], undo: Callable[[], None]
) -> tf.Tensor:
    """Changes variables if the gradients are finite. Cross-replica context, in a graph.

    Args:
      finite: Whether the sums over the replicas are finite, bool [].
      change: Applies gradients and returns their global norm, float64 [].
      undo: Restores what was changed before.

    Returns:
      The norm; 0 for a skipped update.
    """

    def skip() -> tf.Tensor:
        undo()
        return tf.zeros([], tf.float64)

    return tf.cond(finite, change, skip)


def next_scale(
    loss_scale: LossScale, state: TrainingState, finite: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Returns the fields of the next state that belong to the loss scale.

    Args:
      loss_scale: The rule.
      state: The state before the update.
      finite: Whether the update was made, bool [].
    """
    scale, finite_updates = loss_scale.next(state.loss_scale, state.finite_updates, finite)
    skipped = (state.skipped_in_a_row + 1) * (1 - tf.cast(finite, tf.int64))
    return {
        "loss_scale": scale,
        "finite_updates": finite_updates,
        "skipped_in_a_row": skipped,
    }
