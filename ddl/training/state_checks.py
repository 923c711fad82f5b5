"""Checks of a trained state: that it is finite, and the same on all replicas."""

import math
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.distribution.devices import is_on_server
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, TrainingDiverged
from ddl.layers.normalization import has_global_moments
from ddl.step.moving_statistics import Statistics
from ddl.step.sharding import variables_of
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.tasks.parts import copies_of, layers_of, own_items_of, own_variables_of
from ddl.tasks.task import Task, has_step

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
            f"{float(state.loss_scale):g}. {_remedy(update.task)}"
        )
    if not (count := int(state.diverged_for)):
        return
    means = update.metrics.means(state.sums)
    others = [name for name, value in means.items() if not math.isfinite(value)]
    what, remedy = "the loss", _remedy(update.task)
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


def _remedy(task: Task) -> str:
    """Returns the remedy for a loss that is not finite, which in float16 may have overflowed."""
    halves = [layer.name for layer in layers_of(task) if layer.compute_dtype == "float16"]
    if not halves:
        return _REMEDY
    return (
        f"float16 holds numbers up to 65,504: give the last layer, {halves[-1]!r}, dtype='float32' "
        f"and compute the loss in float32, or set PRECISION = 'mixed_bfloat16'. {_REMEDY}"
    )


class VariablesFinite:
    """Checks that variables stay finite."""

    def __init__(self, update: TrainStep, workers: Workers):
        """Selects weights, slots, statistics and averages.

        Args:
          update: The update. Variables of it that are not finite now, such as an untrained mask,
            are never checked.
          workers: The workers that check together.
        """
        task = update.task
        models = layers_of(task) if has_step(task) else [task.model]
        slots = [v for x in update.optimizers.values() for v in variables_of(x, update.sharding)]
        averages = update.averages.variables if update.averages else ()
        weights = {id(v): v.value for model in models for v in model.variables}
        floating = [v for v in (*weights.values(), *slots, *averages) if v.dtype.is_floating]
        self._variables = [v for v in floating if _is_finite(v).numpy()]
        self._workers = workers
        self._traced: Any = None

    def check(self, step: int) -> None:
        """Raises TrainingDiverged with the name of the first variable that is not finite.

        If a variable is not finite on one worker, all workers raise: statistics may differ between
        workers. Eager, cross-replica context, on all workers.
        """
        if not self._variables:
            return
        if any(map(is_on_server, self._variables)):
            # One after the other: a server copies a table of sparse updates for each read, and
            # must not hold copies of all its variables at once.
            own = np.array([_is_finite(variable).numpy() for variable in self._variables])
        else:
            # Not traced by a call: TensorFlow counts those of all trainers of a process together,
            # and warns of frequent ones.
            self._traced = self._traced or self._finite.get_concrete_function()
            own = self._traced().numpy()
        finite = self._workers.gather(own).min(axis=0)
        for variable, is_finite in zip(self._variables, finite, strict=True):
            if not is_finite:
                raise TrainingDiverged(
                    f"Training diverged at step {step}: {variable.name.split(':')[0]} is not "
                    f"finite. {_REMEDY}"
                )

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
    workers, layers = Workers(strategy), layers_of(task)
    generators = [x for x in own_items_of(task) if isinstance(x, tf.random.Generator)]
    states = {id(generator.state) for generator in generators}
    # Moments over all replicas may differ by their rounding on processors of several kinds.
    others = [layer for layer in layers if not has_global_moments(layer)]
    every = [*own_variables_of(task, layers), *Statistics(others, strategy).variables]
    compared = [v for v in every if id(v) not in states and _is_compared(v, strategy)]
    values = [[copy.numpy() for copy in copies_of(variable)] for variable in compared]
    digests = [zlib.crc32(b"".join(one.tobytes() for one in own)) for own in values]
    same = [all(np.array_equal(x, own[0], equal_nan=True) for x in own) for own in values]
    if not values:
        return
    of_workers = workers.gather(np.array([digests, same], np.float64).ravel())
    agree = (of_workers == [*of_workers[0][: len(digests)], *np.ones(len(same))]).all(axis=0)
    for variable, own, *found in zip(compared, values, *np.split(agree, 2), strict=True):
        if not all(found):
            texts = ", ".join(f"{value.ravel()[:3].tolist()}" for value in own[:4])
            raise ReplicasDifferError(
                f"The variable {variable.name.split(':')[0]!r} of {type(task).__name__} has other "
                f"values on other replicas, here {texts}: a layer or a loss, which sees the rows "
                "of its replica alone, has assigned to it. In a layer, assign the result of "
                "ddl.layers.sum_over_replicas; for a loss, assign that of update.mean in a method "
                "step(update, batch); or make it with aggregation=tf.VariableAggregation.MEAN."
            )


def _is_compared(variable: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    dtype = variable.dtype
    return (
        (dtype.is_floating or dtype.is_integer or dtype.is_bool)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and strategy.extended.variable_created_in_scope(variable)
    )
