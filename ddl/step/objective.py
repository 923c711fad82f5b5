"""The scalar objective and the metric sums, made from a task's per-example losses.

A mean over a replica or a microbatch would ignore the weights of the others. `Objective` therefore
forms sums, divided by the constant global batch size B to keep their magnitude. After the
all-reduce, `UpdateStep` divides once by the global Σ weight / B.
"""

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl import draws, microbatch
from ddl.errors import ConfigError
from ddl.layers.broadcasting import broadcasts, with_rank
from ddl.layers.lookups import look_up_rows
from ddl.layers.normalization import has_global_moments, take_over_moments
from ddl.step.effects.stateful import check_stateless
from ddl.step.effects.written import check_loss_writes, moved_in
from ddl.step.metric_sums import MetricSums
from ddl.step.metric_sums.of_output import (
    check_dimensions,
    check_kinds,
    check_metrics,
    has_further_dimension,
    layout_of,
    sums_of,
)
from ddl.step.observing import observe
from ddl.step.onednn import needs_own_graph
from ddl.step.probe import Probe
from ddl.step.rows.tables import tables_in
from ddl.tasks.parts import layers_of
from ddl.tasks.task import (
    LossFunction,
    PerExample,
    Task,
    check_read,
    has_step,
    names_resembling_weight,
)

# More than one row, so that a mean over the batch or a squeeze shows in the shapes.
_PROBE_ROWS, _OTHER_PROBE_ROWS = draws.PROBED


class Objective:
    """The objective Σ weight·loss / B of a replica's microbatch, and its metric sums."""

    def __init__(
        self,
        task: Task,
        element_spec: dict[str, tf.TensorSpec],
        global_batch_size: int,
        strategy: tf.distribute.Strategy,
        loss: LossFunction | None = None,
        optimizers: Collection[keras.optimizers.Optimizer] = (),
    ):
        """Traces the loss on symbolic examples, which builds the task's models if needed.

        The loss is traced for evaluation and for training, which may return different metrics.

        Args:
          task: The task.
          element_spec: One example by feature name, without the batch dimension.
          global_batch_size: B above.
          strategy: An unbuilt model gets its variables in the strategy's scope.
          loss: The task's loss; None takes its `per_example`.
          optimizers: Optimizers whose variables checkpoints hold.

        Raises:
          ConfigError: If the task's losses, weights or metrics have wrong types or shapes, or if
            the loss writes a variable that no checkpoint holds, or draws by Python or NumPy.
        """
        self._task = task
        self._given_loss = loss
        self._where = f"{type(task).__name__}.{getattr(loss, '__name__', 'per_example')}"
        self._global_batch_size = global_batch_size
        self._replicas = strategy.num_replicas_in_sync
        self._names = frozenset(element_spec)
        probe = Probe(task, self.loss, element_spec, strategy, self._check)
        evaluated = probe.output(training=False, rows=_PROBE_ROWS)
        self.needs_own_graph = needs_own_graph(probe.graph, strategy)
        """Whether the gradient must be computed in a graph of its own (`ddl.step.onednn`)."""
        self._unread = probe.unread
        self._check_effects(probe, optimizers)
        drawn = probe.draws
        other = None
        if drawn or has_further_dimension(evaluated, _PROBE_ROWS):
            other = self._of_other_rows(probe, training=False)
        if other is not None and has_further_dimension(evaluated, _PROBE_ROWS):
            check_dimensions(evaluated, other, self._where)
        self.placing = {False: self._placing(probe, drawn, other)}
        """The draws that follow the rows (`ddl.draws.placing`), by whether they are training's."""
        tried = self._tried_in_training(probe)
        self._check_effects(probe, optimizers)
        output = tried or evaluated
        self.tables = tables_in(probe.graph, _PROBE_ROWS)
        """The variables of which the loss looks up single rows (`ddl.step.rows.tables`)."""
        self.gathers = probe.gathers
        """Whether the loss calls `ddl.gather` in training."""
        self.moved = moved_in(probe.graph, task) if tried else []
        """Names of variables that layers and task move in training, but for moments and seeds."""
        self.training_layers = self._layers_in_training(probe if tried else None)
        """Layers of the task, without those that only compute as in an evaluation."""
        self.metrics = layout_of(output, self._where)
        """Layout of the metric sums in training."""
        self.evaluation_metrics = layout_of(evaluated, self._where)
        """Layout of the metric sums in an evaluation."""
        self.task_weighs = output.weight is not None
        """Whether the task returns weights, so that Σ weight may differ from the batch size."""
        self.entries = math.prod(output.loss.shape[1:])
        """Number of losses of an example."""
        self._own_step = has_step(task)
        drawn = probe.draws
        other = self._of_other_rows(probe, training=True) if tried and drawn else None
        self.placing[True] = self._placing(probe, drawn, other) if tried else None

    @property
    def loss(self) -> LossFunction:
        """The loss function; `per_example` of the task is looked up anew, as it may be replaced."""
        return self._given_loss or self._task.per_example

    def of(self, loss: LossFunction) -> "Objective":
        """Returns this objective for another function with the same result.

        A loss that is defined within a step is a new function in each trace.
        """
        if loss == self.loss:
            return self
        other = copy.copy(self)
        other._given_loss = loss
        return other

    def __call__(
        self, features: dict[str, tf.Tensor], training: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes objective and metric sums of one microbatch. Replica context.

        Args:
          features: The microbatch; "weight", float32 [batch], is 0 for padding.
          training: As in `Task.per_example`.

        Returns:
          The objective, float32 [] or float64 [], and the metric sums, float64 [size] of
          `MetricSums`. The sum "loss" holds only the task's loss, without weight penalties and
          losses of layers.

        Raises:
          ConfigError: If the task's losses, weights or metrics have wrong types or shapes.
          DataError: If the task ignores a feature such as "sample_weight"; while tracing.
        """
        weighed, of_layers, sums, _ = self.weighed(features, training)
        objective = tf.reduce_sum(weighed)
        for own_loss in of_layers:
            objective += own_loss
        return objective / tf.cast(self._global_batch_size, objective.dtype), sums

    def weighed(
        self, features: dict[str, tf.Tensor], training: bool
    ) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns weight·loss of each entry, the losses of layers, metric sums, and weights.

        Arguments and errors are those of `__call__`.

        Returns:
          Weighted losses, [batch, …]; losses of layers times the sum of the weights, [] each; the
          metric sums; and the weights, [batch, …].
        """
        observe("rows", features=features)
        features = dict(features)
        example_weight = features.pop("weight")
        # Copies that only the task reads.
        watched = {name: tf.identity(features[name]) for name in self._watched(features, training)}
        if (current := microbatch.current()) is not None:
            current.placing = self.placing[training]
        output = self.loss({**features, **watched}, training)
        if watched and not tf.executing_eagerly():
            check_read(watched, type(self._task).__name__, output)
        self._check(output, example_weight.shape[0])
        observe("outputs", name=self._where, output=output)
        # Weights and sums need more than half precision.
        half = output.loss.dtype in (tf.float16, tf.bfloat16)
        loss = tf.cast(output.loss, tf.float32) if half else output.loss
        weight = tf.broadcast_to(
            with_rank(tf.cast(example_weight, loss.dtype), loss.shape.rank), tf.shape(loss)
        )
        if output.weight is not None:
            weight *= with_rank(tf.cast(output.weight, loss.dtype), loss.shape.rank)
        # If all weights are the constant 1, forward and backward pass skip the multiplication.
        is_one = output.weight is None and _is_constant_one(example_weight)
        weighed = loss if is_one else tf.math.multiply_no_nan(loss, weight)
        # A layer's loss is a mean over the replica's examples and gets their total weight.
        of_layers = [
            tf.reduce_sum(weight) * tf.cast(own_loss, loss.dtype)
            for own_loss in (self._losses_of_layers() if training else ())
        ]
        metrics = self.metrics if training else self.evaluation_metrics
        self._check_names(output, metrics)
        sums = sums_of(metrics, loss, output, None if is_one else weight, example_weight)
        return weighed, of_layers, sums, weight

    def _watched(self, features: dict[str, tf.Tensor], training: bool) -> Sequence[str]:
        """Returns features such as "sample_weight" that the task may not read."""
        if training:
            return self._unread
        # In an evaluation a task may ignore a feature that it reads in training.
        return [name for name in names_resembling_weight(features) if name not in self._names]

    def _losses_of_layers(self) -> Sequence[tf.Tensor]:
        """Returns the losses from `add_loss` or activity regularizers in the last call."""
        if self._own_step:
            own = [loss for layer in layers_of(self._task) for loss in layer._losses]
        else:
            own = _losses_without_penalties(self._task.model)
        if own and self._own_step:
            # A loss may call a model several times, and Keras keeps the losses of the last call.
            raise ConfigError(
                f"{self._where}: a model has losses of its own (add_loss, or an activity "
                "regularizer), which a task with a `step` must not have. Return these losses from "
                "the task instead."
            )
        current = microbatch.current()
        alone = current is None or current.own_moments or self._replicas == 1
        if own and not alone and any(map(has_global_moments, self._task.model._flatten_layers())):
            # While one replica waits at a collective, the others overwrite Keras's list of losses.
            raise ConfigError(
                "The model has losses of its own (add_loss, or an activity regularizer) together "
                "with BatchNormalization over the global batch, and Keras mixes up such losses on "
                "several replicas. Return these losses from the task instead, or set "
                "Trainer.batch_moments = 'per_replica'."
            )
        if own and current is not None and current.mask is not None:
            logging.log_first_n(
                logging.WARNING,
                "The model adds losses of its own (add_loss, or an activity regularizer). They "
                "are means over all rows of a replica, including padding, so in a batch that is "
                "not full they depend on the number of replicas. Return them from the task to "
                "have them weighted.",
                1,
            )
        return own

    def _check_effects(
        self, probe: Probe, optimizers: Collection[keras.optimizers.Optimizer]
    ) -> None:
        """Raises ConfigError if the last trace drew or wrote what no checkpoint holds."""
        probe.check_python_draws(self._where)
        check_loss_writes(self._where, probe.graph, self._task, optimizers)
        check_stateless(self._where, probe.graph)

    def _placing(self, probe: Probe, drawn: Any, other: PerExample | None) -> Any:
        """Returns the placing of the draws of two probes; None if there are not two."""
        if drawn and other is None:
            return None
        return draws.placing(drawn, probe.draws if drawn else drawn, *draws.PROBED)

    def _of_other_rows(self, probe: Probe, training: bool) -> PerExample | None:
        """Returns the task's output for another number of rows; None if it takes none such."""
        try:
            return probe.output(training, rows=_OTHER_PROBE_ROWS)
        except ConfigError:
            raise
        except Exception:  # such as of a task for pairs of rows
            return None

    def _tried_in_training(self, probe: Probe) -> PerExample | None:
        """Returns the task's training output; None if only the training step can trace it.

        A layer may accept only one batch size. The trace of the training step raises the errors of
        the task. In the probe, BatchNormalization takes moments without an all-reduce.
        """
        layers = layers_of(self._task)
        take_over_moments(layers)
        look_up_rows(layers)
        try:
            return probe.output(training=True, rows=_PROBE_ROWS)
        except ConfigError:
            raise
        except Exception:
            return None

    def _layers_in_training(self, probe: Probe | None) -> list[keras.layers.Layer]:
        """Returns the layers but for normalizations that the probe saw take no moments.

        Such are those of a frozen teacher that the task calls with training=False. All layers are
        returned if the task could not be traced for training, so that there is no probe.
        """
        layers, current = layers_of(self._task), None if probe is None else probe.microbatch
        if current is None or current.held_moments is None:
            return layers
        normalizing = {id(layer) for layer in current.held_moments.layers}
        kinds = keras.layers.BatchNormalization
        return [x for x in layers if not isinstance(x, kinds) or id(x) in normalizing]

    def _check_names(self, output: PerExample, metrics: MetricSums) -> None:
        if {"loss", *output.metrics} != set(metrics.metrics):
            raise ConfigError(
                f"{self._where} must always return the same metrics, but "
                f"it returned {', '.join(output.metrics) or '(none)'}; in the check on "
                f"{_PROBE_ROWS} examples before training it returned "
                f"{', '.join(metrics.metrics[1:]) or '(none)'}. Metric names may depend on "
                f"`training` alone. If the model cannot train on {_PROBE_ROWS} examples, return "
                "the same metrics in training and evaluation."
            )

    def _check(self, output: PerExample, batch: int) -> None:
        name = self._where
        if not isinstance(output, PerExample):
            raise ConfigError(
                f"{name} must return a ddl.PerExample with one loss for each example, got "
                f"{type(output).__name__}."
            )
        check_kinds(output, name)
        if output.loss.shape.rank == 0:
            raise ConfigError(
                f"{name} must return one loss for each example, shape [batch], got a scalar loss. "
                "Padding, masks and several replicas are weighted per example. Remove the "
                "reduce_mean, or create a Keras loss with reduction=None."
            )
        if output.loss.shape[0] != batch:
            raise ConfigError(
                f"{name} must return losses whose first dimension is the batch, {batch}, got shape "
                f"{tuple(output.loss.shape)}. Reduce over the other dimensions alone."
            )
        if output.weight is not None and not broadcasts(output.weight.shape, output.loss.shape):
            raise ConfigError(
                f"{name} must return one weight for each loss, or for the first dimensions of the "
                f"losses, got weights of shape {tuple(output.weight.shape)} and losses of shape "
                f"{tuple(output.loss.shape)}. Return weights [{batch}], one for each example."
            )
        check_metrics(output, name, batch)


def _losses_without_penalties(model: keras.Model) -> list[tf.Tensor]:
    """Returns the losses of a model's layers in its last call.

    Keras lists the penalties on weights last. They do not depend on the examples and are added once
    after the all-reduce (ddl.step.gradients.add_regularization).
    """
    losses = model.losses
    penalized = [v for v in model.trainable_variables if v.regularizer is not None]
    return losses[: len(losses) - len(penalized)]


def _is_constant_one(weight: tf.Tensor) -> bool:
    value = tf.get_static_value(weight)
    return value is not None and bool((value == 1).all())
