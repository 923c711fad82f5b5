"""Training that diverged: what is not finite, and where it began."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, TrainingDiverged
from ddl.microbatch import explaining_stale_traces
from ddl.step import TrainingState, UpdateStep

_REMEDY = "Lower the learning rate, clip the gradient, or look at the data."


class VariablesFinite:
    """Looks whether variables are finite that were so at the start."""

    def __init__(self, variables: Iterable[tf.Variable]):
        """Leaves out, for good, what is not finite now: such as a mask that is not trained."""
        floating = [variable for variable in variables if variable.dtype.is_floating]
        self._variables = [variable for variable in floating if _is_finite(variable)]

    def check(self, step: int) -> None:
        """Raises TrainingDiverged, naming the first variable that is not finite, if one is not."""
        for variable in self._variables:
            if not _is_finite(variable):
                raise TrainingDiverged(
                    f"training diverged at step {step}: {variable.name.split(':')[0]} is not "
                    f"finite. {_REMEDY}"
                )


def _is_finite(variable: tf.Variable) -> bool:
    value = variable.read_value()
    # One pass and no copy; it may overflow where all is finite, and so is not the last word.
    return bool(
        np.isfinite(tf.nn.l2_loss(value).numpy())
        or np.isfinite(value.numpy().astype(np.float64)).all()
    )


def check_state_finite(state: TrainingState, update: UpdateStep, max_skipped_updates: int) -> None:
    """Looks at the state after a loop. Eager, cross-replica context.

    Raises:
      TrainingDiverged: If the loss is not finite, or so many updates in a row were skipped.
    """
    skipped = int(state.skipped_in_a_row)
    if skipped >= max_skipped_updates:
        raise TrainingDiverged(
            f"training diverged after step {int(state.step)}: the gradients of {skipped} batches "
            f"in a row were not finite, at a loss scale of {float(state.loss_scale):g} in the end. "
            f"{_first_overflow(state, update)} {_REMEDY}"
        )
    if not np.isfinite(state.sums.numpy()).all():
        raise TrainingDiverged(
            f"training diverged at or before step {int(state.step)}: the loss is not finite. "
            + _REMEDY
        )


def _first_overflow(state: TrainingState, update: UpdateStep) -> str:
    """Says where the last batch's gradients were not finite, by computing them again.

    All that went into them is a function of the state, so that naming costs nothing before.
    """
    batch = int(state.batches) - 1
    iterator = update.pipeline.iterator(update.strategy, batch)

    @tf.function(autograph=False)
    def finite_gradients(iterator: Any, state: TrainingState) -> tf.Tensor:
        resident = update.pipeline.resident_arrays(update.strategy)
        return update.finite_gradients(next(iterator), resident, state)

    # The scale was halved after that batch: what is not finite now was not before either.
    state = state._replace(batches=tf.constant(batch, tf.int64))
    try:
        with explaining_stale_traces():
            finite = finite_gradients(iterator, state).numpy()
    except ConfigError:
        return "Where it began cannot be told: the model keeps tensors of an earlier trace."
    if finite.all():
        return "On each replica they are finite at that scale."
    # From the last variable on, as the backward pass goes: what is not finite in one layer
    # spreads to those before it, and through synchronized layers to other replicas.
    variable = np.flatnonzero(~finite.all(axis=0))[-1]
    replica = np.argmin(finite[:, variable])
    return (
        f"In the last batch, number {batch}, the first on the way back from the loss was that of "
        f"{update.variables[variable].path} on replica {replica}."
    )
