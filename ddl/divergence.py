"""Training that diverged: what is not finite, and where it began."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, TrainingDiverged
from ddl.microbatch import explaining_stale_traces
from ddl.parameter_servers import has_parameter_servers
from ddl.step import UpdateStep
from ddl.training_state import TrainingState
from ddl.workers import Workers

_REMEDY = "Lower the learning rate, clip the gradient, or look at the data."


class VariablesFinite:
    """Looks whether variables are finite that were so at the start."""

    def __init__(self, variables: Iterable[tf.Variable], workers: Workers):
        """Leaves out, for good, what is not finite now: such as a mask that is not trained."""
        self._variables = [
            variable
            for variable in variables
            if variable.dtype.is_floating and _is_finite(variable).numpy()
        ]
        self._workers = workers

    def check(self, step: int) -> None:
        """Raises TrainingDiverged, naming the first variable that is not finite, if one is not.

        On all workers if it is so on one, whose statistics may be its own.
        """
        if not self._variables:
            return
        finite = self._workers.rows(self._finite().numpy()).min(axis=0)
        for variable, is_finite in zip(self._variables, finite, strict=True):
            if not is_finite:
                raise TrainingDiverged(
                    f"training diverged at step {step}: {variable.name.split(':')[0]} is not "
                    f"finite. {_REMEDY}"
                )

    @tf.function(autograph=False)
    def _finite(self) -> tf.Tensor:
        """Bool [variables]."""
        return tf.stack([_is_finite(variable) for variable in self._variables])


def _is_finite(variable: tf.Variable) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(variable.read_value()))


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
    if count := int(state.diverged_for):
        raise TrainingDiverged(
            f"training diverged at step {int(state.step) - count + 1}: the loss is not finite, "
            f"from batch {int(state.batches) - count} on. {_REMEDY}"
        )


def _first_overflow(state: TrainingState, update: UpdateStep) -> str:
    """Says where the last batch's gradients were not finite, by computing them again.

    All that went into them is a function of the state, so that naming costs nothing before.
    """
    if has_parameter_servers(update.strategy):
        return "With parameter servers it is not told where that began."
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
