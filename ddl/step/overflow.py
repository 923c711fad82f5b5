"""Overflow of a gradient: all replicas skip the update, and the loss scale falls.

The check looks at the sum over the replicas, which all of them hold: an infinity on one replica
makes it infinite on all, so they decide the same. A skipped update leaves weights, slots, averages
and moving statistics as they were.

Micikevicius et al. 2018, "Mixed Precision Training".
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ddl.precision import LossScale
from ddl.step.gradients import Gradient, packs, values_of, with_values
from ddl.step.packing import Packed
from ddl.step.state import TrainingState


def each_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns which gradients hold neither an infinity nor a NaN: bool [gradients]."""
    return tf.stack([tf.reduce_all(tf.math.is_finite(values_of(g))) for g in gradients])


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns whether no gradient holds an infinity or a NaN: bool []."""
    return tf.reduce_all(each_finite(gradients))


def multiply_finite(
    gradients: Sequence[Gradient], factor: tf.Tensor
) -> tuple[list[Gradient], tf.Tensor]:
    """Returns gradients times a scalar, and whether they were finite, in the same buffers.

    Args:
      gradients: The gradients.
      factor: [], cast to the gradients' dtypes.
    """
    packed = Packed([values_of(gradient) for gradient in gradients], shared=True)
    finite = tf.reduce_all(each_finite(packed.buffers))
    values = packed.each(lambda buffer: buffer * tf.cast(factor, buffer.dtype))
    return with_values(gradients, values), finite


def change_unless_overflow(
    strategy: tf.distribute.Strategy,
    finite: tf.Tensor,
    change: Callable[[], tf.Tensor],
    undo: Callable[[], None],
) -> tf.Tensor:
    """Changes variables if the gradients are finite. Cross-replica context, in a graph.

    Args:
      strategy: The strategy.
      finite: Whether the sums over the replicas are finite, bool [].
      change: Applies gradients and returns their global norm, float64 [].
      undo: Restores what was changed before.

    Returns:
      The norm; 0 for a skipped update.
    """

    def skip() -> tf.Tensor:
        undo()
        return tf.zeros([], tf.float64)

    if packs(strategy):
        # The host asks once, not once for each device.
        with tf.device("CPU:0"):
            finite = tf.identity(finite)
    return tf.cond(finite, change, skip)


@dataclasses.dataclass(frozen=True)
class Changes:
    """The changes of the training state by an update. Cross-replica context, in a graph.

    Attributes:
      sums: Metric sums of the update, float64 [n].
      norms: Returns what an update adds to `gradient_norms`, if it was made, bool []; None:
        nothing.
    """

    sums: tf.Tensor
    norms: Callable[[tf.Tensor], tf.Tensor] | None

    def made(self, state: TrainingState) -> dict[str, tf.Tensor]:
        """Returns the changed fields after an update that was made, but for the loss scale."""
        changed = {"step": state.step + 1, "sums": state.sums + self.sums}
        if self.norms is not None:
            changed["gradient_norms"] = state.gradient_norms + self.norms(tf.constant(True))
        return changed

    def by_selection(
        self, state: TrainingState, finite: tf.Tensor, loss_scale: LossScale
    ) -> dict[str, tf.Tensor]:
        """Returns the changed fields.

        Args:
          state: The state before the update.
          finite: Whether the update was made, bool [].
          loss_scale: The rule of the loss scale.
        """
        scale, count = loss_scale.next(state.loss_scale, state.finite_updates, finite)
        sums = tf.where(finite, self.sums, tf.zeros_like(self.sums))
        changed = {
            "step": state.step + tf.cast(finite, tf.int64),
            "loss_scale": scale,
            "finite_updates": count,
            "skipped_in_a_row": tf.where(
                finite, tf.zeros_like(state.skipped_in_a_row), state.skipped_in_a_row + 1
            ),
            "sums": state.sums + sums,
        }
        if self.norms is not None:
            changed["gradient_norms"] = state.gradient_norms + self.norms(finite)
        return changed

    def by_branch(
        self, state: TrainingState, finite: tf.Tensor, loss_scale: LossScale
    ) -> dict[str, tf.Tensor]:
        """Returns `by_selection` from the branch of a condition, where each selection is a kernel.

        The host knows already whether the update was made: `change_unless_overflow` asks.
        """

        def made() -> dict[str, tf.Tensor]:
            scale, count = loss_scale.after_finite(state.loss_scale, state.finite_updates)
            skipped = tf.zeros_like(state.skipped_in_a_row)
            return self.made(state) | _fields(scale, count, skipped)

        def skipped() -> dict[str, tf.Tensor]:
            same = {name: tf.identity(getattr(state, name)) for name in self._of_made}
            scale, count = loss_scale.after_overflow(state.loss_scale, state.finite_updates)
            return same | _fields(scale, count, state.skipped_in_a_row + 1)

        with tf.device("CPU:0"):
            finite = tf.identity(finite)
        return tf.cond(finite, made, skipped)

    @property
    def _of_made(self) -> list[str]:
        """Names of the fields of `made`."""
        return ["step", "sums", *["gradient_norms"] * (self.norms is not None)]


def _fields(scale: tf.Tensor, count: tf.Tensor, skipped: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the fields of the state that belong to the loss scale."""
    return {
        "loss_scale": tf.identity(scale),
        "finite_updates": tf.identity(count),
        "skipped_in_a_row": skipped,
    }


class KeptValues:
    """The values of variables on every replica, read when this object is made.

    They are copies, so that `restore` is exact to the bit. Cross-replica context, in a graph.
    """

    def __init__(self, variables: Sequence[tf.Variable], strategy: tf.distribute.Strategy):
        """Reads the variables.

        Args:
          variables: The strategy's variables; they may differ between replicas.
          strategy: The strategy.
        """
        self._variables = list(variables)
        self._strategy = strategy
        self._values: list[Any] = strategy.run(lambda: [v.read_value() for v in self._variables])

    def restore(self) -> None:
        """Assigns the values on every replica."""
        for variable, value in zip(self._variables, self._values, strict=True):
            self._strategy.extended.update(variable, _assign, args=(value,))


def _assign(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    return variable.assign(value)
