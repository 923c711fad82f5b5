"""Checks of a trained state: that it is finite, and the same on all replicas."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.distribution.devices import is_on_server
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, TrainingDiverged
from ddl.layers.normalization import has_global_moments
from ddl.step.moving_statistics import Statistics
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.tasks.parts import copies_of, layers_of, own_items_of, own_variables_of
from ddl.tasks.task import Task

_REMEDY = "Lower the learning rate, clip the gradient, or check the data."


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
            f"{float(state.loss_scale):g}. {_REMEDY}"
        )
    if not (count := int(state.diverged_for)):
        return
    means = update.metrics.means(state.sums)
    others = [name for name, value in means.items() if not math.isfinite(value)]
    what, remedy = "the loss", _REMEDY
    if others and not any(name.split("/")[0] == "loss" for name in others):
        what = f"the metric {others[0]!r}"
        remedy = (
            "The loss is finite. Return a finite number of this metric for each example, or leave "
            "the metric out."
        )
    raise TrainingDiverged(
        f"Training diverged at step {int(state.step) - count + 1}: {what} is not finite from "
        f"batch {int(state.batches) - count} on. {remedy}"
    )


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
        return tf.stack([_is_finite(variable) for variable in self._variables])


def _is_finite(variable: tf.Variable) -> tf.Tensor:
    if not is_on_server(variable):
        return tf.reduce_all(tf.math.is_finite(variable.read_value()))
    # On the server that holds the variable, so that it sends only the result. Without a mask, whose
    # smaller memory a server's threads would each keep for later.
    with tf.device(variable.device):
        value = variable.read_value()
        return tf.math.is_finite(tf.reduce_sum(value - value))


class ReplicasDifferError(ConfigError):
    """A variable of the task or of a layer has other values on other replicas."""


def check_same_on_replicas(task: Task, strategy: tf.distribute.Strategy) -> None:
    """Compares the copies of the variables that losses and layers write: a checkpoint holds one.

    Variables that are read together (`tf.VariableSynchronization.ON_READ`) and states of
    `tf.random.Generator` may differ. Eager, cross-replica context, on all workers.

    Raises:
      ReplicasDifferError: If the copies of a variable differ; on all workers.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    variables = [v for v in _variables(task, strategy) if _is_compared(v, strategy)]
    everywhere = _gathered([copies_of(v) for v in variables], Workers(strategy))
    for variable, values in zip(variables, everywhere, strict=True):
        if not all(np.array_equal(value, values[0], equal_nan=True) for value in values):
            texts = [f"{value.ravel()[:3].tolist()}" for value in values[:4]]
            raise ReplicasDifferError(
                f"The variable {variable.name.split(':')[0]!r} of {type(task).__name__} has other "
                f"values on other replicas, of which a checkpoint would hold those of the first: "
                f"{', '.join(texts)}. A layer or a loss, which sees the rows of its replica alone, "
                "has assigned to it. In a layer, assign what ddl.layers.sum_over_replicas returns. "
                "For a loss, assign in a method step(update, batch), such as "
                "self.variable.assign(update.mean(self.function, batch)). Or make the variable "
                "with aggregation=tf.VariableAggregation.MEAN."
            )


def _variables(task: Task, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    generators = [x for x in own_items_of(task) if isinstance(x, tf.random.Generator)]
    states = {id(generator.state) for generator in generators}
    layers = layers_of(task)
    # Moments over all replicas may differ by their rounding on processors of several kinds.
    others = [layer for layer in layers if not has_global_moments(layer)]
    own = [v for v in own_variables_of(task, layers) if id(v) not in states]
    return own + Statistics(others, strategy).variables


def _is_compared(variable: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    dtype = variable.dtype
    return (
        (dtype.is_floating or dtype.is_integer or dtype.is_bool)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and strategy.extended.variable_created_in_scope(variable)
    )


def _gathered(
    all_copies: Sequence[Sequence[tf.Variable]], workers: Workers
) -> list[list[np.ndarray]]:
    """Returns for each variable the values of all replicas of all workers, on the host."""
    own = [[copy.numpy() for copy in copies] for copies in all_copies]
    if workers.number == 1 or not own:
        return own
    # One message for all values. float64 represents the values of the narrower floats exactly.
    flat = [np.reshape(value, -1).astype(np.float64) for values in own for value in values]
    rows = workers.gather(np.concatenate(flat))
    ends = np.cumsum([len(part) for part in flat])[:-1]
    parts = iter(np.split(rows, ends, axis=1))
    return [[row for _ in values for row in next(parts)] for values in own]
