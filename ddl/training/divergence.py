"""Checks for divergence: which values are not finite, and where they first occurred."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.distribution.devices import is_on_server
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, TrainingDiverged
from ddl.step.gradients import trainable_variables
from ddl.step.overflow import KeptValues, each_finite
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.step.update import Pass, StepBatch
from ddl.tasks.task import has_step
from ddl.training.loop.stale_traces import explaining_stale_traces

_REMEDY = "Lower the learning rate, clip the gradient, or check the data."

_UNKNOWN_ORIGIN = "The origin could not be located: the model keeps tensors of an earlier trace."


class VariablesFinite:
    """Checks that variables stay finite."""

    def __init__(self, variables: Iterable[tf.Variable], workers: Workers):
        """Selects the variables to check.

        Args:
          variables: Variables that are not finite now, such as an untrained mask, are never
            checked.
          workers: The workers that check together.
        """
        self._variables = [
            variable
            for variable in variables
            if variable.dtype.is_floating and _is_finite(variable).numpy()
        ]
        self._workers = workers
        self._traced: Any = None
        self._on_servers = any(map(is_on_server, self._variables))

    def check(self, step: int) -> None:
        """Raises TrainingDiverged with the name of the first variable that is not finite.

        If a variable is not finite on one worker, all workers raise: statistics may differ between
        workers. Eager, cross-replica context, on all workers.
        """
        if not self._variables:
            return
        finite = self._workers.gather(self._which()).min(axis=0)
        for variable, is_finite in zip(self._variables, finite, strict=True):
            if not is_finite:
                raise TrainingDiverged(
                    f"Training diverged at step {step}: {variable.name.split(':')[0]} is not "
                    f"finite. {_REMEDY}"
                )

    def _which(self) -> np.ndarray:
        """Returns which variables are finite: bool [variables]."""
        if self._on_servers:
            # One after the other: a server copies a table of sparse updates for each read, and
            # must not hold copies of all its variables at once.
            return np.array([_is_finite(variable).numpy() for variable in self._variables])
        # Not traced by a call: TensorFlow counts those of all trainers of a process together, and
        # warns of frequent ones.
        self._traced = self._traced or self._finite.get_concrete_function()
        return self._traced().numpy()

    @tf.function(autograph=False)
    def _finite(self) -> tf.Tensor:
        """Returns which variables are finite: bool [variables]."""
        return tf.stack([_is_finite(variable) for variable in self._variables])


def _is_finite(variable: tf.Variable) -> tf.Tensor:
    if not is_on_server(variable):
        return tf.reduce_all(tf.math.is_finite(variable.read_value()))
    # On the server that holds the variable, so that it sends only the result. Without a mask, whose
    # smaller memory a server's threads would each keep for later.
    with tf.device(variable.device):
        value = variable.read_value()
        return tf.math.is_finite(tf.reduce_sum(value - value))


def check_state_finite(state: TrainingState, update: TrainStep, max_skipped_updates: int) -> None:
    """Checks the state after a training loop. Eager, cross-replica context, on all workers.

    Raises:
      TrainingDiverged: If the loss or a metric is not finite, or if at least
        `max_skipped_updates` updates in a row were skipped.
    """
    skipped = int(state.skipped_in_a_row)
    if skipped >= max_skipped_updates:
        raise TrainingDiverged(
            f"Training diverged after step {int(state.step)}: the gradients of {skipped} "
            "consecutive batches were not finite, at a final loss scale of "
            f"{float(state.loss_scale):g}. {_first_overflow(state, update)} {_REMEDY}"
        )
    if count := int(state.diverged_for):
        what, remedy = _not_finite(state, update)
        raise TrainingDiverged(
            f"Training diverged at step {int(state.step) - count + 1}: {what} is not finite from "
            f"batch {int(state.batches) - count} on. {remedy}"
        )


def _not_finite(state: TrainingState, update: TrainStep) -> tuple[str, str]:
    """Returns the figure that is not finite, a metric if the loss is, and what to do."""
    means = update.metrics.means(state.sums)
    others = [name for name, value in means.items() if not math.isfinite(value)]
    if not others or any(name.split("/")[0] == "loss" for name in others):
        return "the loss", _REMEDY
    remedy = (
        "The loss is finite. Return a finite number of this metric for each example, or leave the "
        "metric out."
    )
    return f"the metric {others[0]!r}", remedy


def _finite_gradients(update: TrainStep, batch: Batch, state: TrainingState) -> tf.Tensor:
    """Returns which gradients of each replica are finite before the all-reduce.

    Only of the built-in step. Changes no variable. Cross-replica context, in a graph.

    Returns:
      bool [replicas of this worker, variables].
    """
    kept = KeptValues(update.statistics, update.strategy)
    (objective,) = update.plan.losses.values()
    variables = trainable_variables(update.task.model)
    made = Pass(StepBatch("", 0, batch), state)  # draws the numbers of the update's only pass
    gradients, _ = update.gradient.of_replicas(objective, variables, made)
    finite = update.strategy.run(each_finite, args=(gradients,))
    kept.restore()
    return tf.stack(update.strategy.experimental_local_results(finite))


def _first_overflow(state: TrainingState, update: TrainStep) -> str:
    """Describes where the last batch's gradients were not finite, by computing them again.

    The state determines all inputs of the gradients, so training records nothing for this message.
    All workers call this function together, because they skip the same updates, and all return the
    same text.
    """
    if traits_of(update.strategy).asynchronous:
        return "With parameter servers, the origin of the overflow cannot be located."
    if has_step(update.task):
        return "In a task's own step, the origin of the overflow cannot be located."
    workers = Workers(update.strategy)
    batch = int(state.batches) - 1
    (pipeline,) = update.pipelines.values()
    iterator = pipeline.iterator(update.strategy, batch)

    @tf.function(autograph=False)
    def finite_gradients(iterator: Any, state: TrainingState) -> tf.Tensor:
        batch = pipeline.next_batch(iterator, update.strategy, state.batches)
        return _finite_gradients(update, batch, state)

    # The loss scale was halved after that batch: a gradient that overflows at the present scale
    # overflowed at the earlier one too.
    state = state._replace(batches=tf.constant(batch, tf.int64))
    traced = True
    try:
        with explaining_stale_traces():
            finite_gradients.get_concrete_function(iterator, state)
    except ConfigError:
        traced = False
    # Layers may communicate in the function: no worker runs it unless all workers can.
    if workers.any(not traced):
        return _UNKNOWN_ORIGIN
    try:
        with explaining_stale_traces():  # the error may occur only in the call, on all workers
            own = finite_gradients(iterator, state).numpy()
    except ConfigError:
        return _UNKNOWN_ORIGIN
    finite = workers.gather(own.ravel()).reshape(-1, own.shape[1]).astype(bool)
    if finite.all():
        return "The gradients of each replica are finite at that scale."
    # The last variable comes first in the backward pass. A value that is not finite spreads from
    # there to earlier layers, and through synchronized layers to other replicas.
    variable = np.flatnonzero(~finite.all(axis=0))[-1]
    trained = trainable_variables(update.task.model)
    replica = int(np.argmin(finite[:, variable]))
    of_worker = f" of worker {replica // len(own)}" if workers.number > 1 else ""
    return (
        f"In the last batch, number {batch}, the first gradient of the backward pass that is not "
        f"finite is that of {trained[variable].path} on replica {replica}{of_worker}."
    )
