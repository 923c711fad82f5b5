"""The scalar objective and the metric sums, made from a task's per-example losses.

A mean over a replica or a microbatch would ignore the weights of the others. `Loss` therefore forms
sums, divided by the constant global batch size B to keep their magnitude. After the all-reduce, the
gradient is divided once by the global Σ weight / B.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.layers.broadcasting import broadcasts, with_rank
from ddl.layers.normalization import has_global_moments
from ddl.step.metric_sums import MetricSums, check_kinds, check_metrics, sums_of
from ddl.step.rows import Table
from ddl.tasks.parts import layers_of
from ddl.tasks.task import (
    LossFunction,
    PerExample,
    Task,
    check_read,
    has_step,
    names_resembling_weight,
)


class Form(NamedTuple):
    """What the probes found of a loss in training, or in an evaluation.

    Attributes:
      metrics: Layout of the metric sums.
      entries: Number of losses of an example.
      weighs: Whether the task returns weights, so that Σ weight may differ from the batch size.
      gathers: Whether the loss calls `ddl.gather`.
      unread: Features that are named like weights and that the task does not read.
      tables: The variables of which the loss looks up single rows (`ddl.step.rows`).
      layers: Layers of the task, without those that only compute as in an evaluation.
      placing: Which draws follow the rows (`ddl.draws.placing`); None if that is unknown.
      moved: Names of variables that layers and task move, but for moments of BatchNormalization.
    """

    metrics: MetricSums
    entries: int
    weighs: bool
    gathers: bool
    unread: Sequence[str]
    tables: Mapping[int, Table]
    layers: Sequence[keras.layers.Layer]
    placing: Mapping[Any, int] | None
    moved: Sequence[str]


class Loss:
    """The objective Σ weight·loss / B of a replica's microbatch, and its metric sums.

    Attributes:
      task: The task.
      source: Name of the source of its examples.
      where: Name of the loss in errors.
    """

    def __init__(
        self,
        task: Task,
        function: LossFunction,
        source: str,
        global_batch_size: int,
        form: Callable[["Loss", bool], Form],
        replicas: int,
    ):
        """Keeps the arguments; probes nothing.

        Args:
          task: As above, like the two that follow.
          function: See above.
          source: See above.
          global_batch_size: B above.
          form: Probes the loss for training (True) or evaluation.
          replicas: Number of replicas.
        """
        self.task = task
        # Looked up anew each time: a test or a notebook may replace the method.
        self._function = None if function == getattr(task, "per_example", None) else function
        self.source = source
        self.where = f"{type(task).__name__}.{getattr(function, '__name__', 'per_example')}"
        self._global_batch_size = global_batch_size
        self._form = form
        self._forms: dict[bool, Form] = {}
        self._replicas = replicas
        self._own_step = has_step(task)

    def form(self, training: bool) -> Form:
        """Returns what the probes found for training or evaluation; the first call probes.

        Eager, cross-replica context.

        Raises:
          ConfigError: If the task's losses, weights or metrics have wrong types or shapes, or
            depend on other examples; if the loss draws by Python or NumPy, or writes a variable
            that no checkpoint holds.
        """
        if training not in self._forms:
            self._forms[training] = self._form(self, training)
        return self._forms[training]

    @property
    def function(self) -> LossFunction:
        """The loss function; it takes features and `training`."""
        return self._function or self.task.per_example

    @property
    def training(self) -> Form:
        """The form in training."""
        return self.form(True)

    def of(self, function: LossFunction) -> "Loss":
        """Returns this loss for an equal function, such as one that each trace defines anew."""
        other = copy.copy(self)
        other._function = function
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
        form = self.form(training)
        features = dict(features)
        example_weight = features.pop("weight")
        names = form.unread if training else names_resembling_weight(features)
        watched = {name: tf.identity(features[name]) for name in names}  # that only the task reads
        if (current := microbatch.current()) is not None:
            current.placing = form.placing
        output = self.function({**features, **watched}, training)
        if watched and not tf.executing_eagerly():
            check_read(watched, type(self.task).__name__, output)
        self.check(output, example_weight.shape[0])
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
        self._check_names(output, form.metrics)
        sums = sums_of(form.metrics, loss, output, None if is_one else weight, example_weight)
        return weighed, of_layers, sums, weight

    def _losses_of_layers(self) -> Sequence[tf.Tensor]:
        """Returns the losses from `add_loss` or activity regularizers in the last call."""
        if self._own_step:
            own = [loss for layer in layers_of(self.task) for loss in layer._losses]
        else:
            own = _losses_without_penalties(self.task.model)
        if own and self._own_step:
            # A loss may call a model several times, and Keras keeps the losses of the last call.
            raise ConfigError(
                f"{self.where}: a model has losses of its own (add_loss, or an activity "
                "regularizer), which a task with a `step` must not have. Return these losses from "
                "the task instead."
            )
        current = microbatch.current()
        alone = current is None or current.own_moments or self._replicas == 1
        if own and not alone and any(map(has_global_moments, self.task.model._flatten_layers())):
            # While one replica waits at a collective, the others overwrite Keras's list of losses.
            raise ConfigError(
                "The model has losses of its own (add_loss, or an activity regularizer) together "
                "with BatchNormalization over the global batch, and Keras mixes up such losses on "
                "several replicas. Return these losses from the task instead, or set "
                "Trainer.batch_moments = 'per_replica'."
            )
        if own and current is not None and current.mask is not None:
            raise ConfigError(
                "The model has losses of its own (add_loss, or an activity regularizer), which are "
                "means over all rows of a replica, padding included, so that they would depend on "
                "the number of replicas. Return them from the task, or use a batch size that "
                "divides the number of examples, without weights."
            )
        return own

    def _check_names(self, output: PerExample, metrics: MetricSums) -> None:
        if {"loss", *output.metrics} != set(metrics.metrics):
            raise ConfigError(
                f"{self.where} must always return the same metrics, but it returned "
                f"{', '.join(output.metrics) or '(none)'}; before training it returned "
                f"{', '.join(metrics.metrics[1:]) or '(none)'}. Metric names may depend on "
                "`training` alone."
            )

    def check(self, output: PerExample, batch: int) -> None:
        """Checks types and shapes of what the loss returned for a number of rows.

        Raises:
          ConfigError: If one is wrong.
        """
        name = self.where
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
    value: Any = tf.get_static_value(weight)
    return value is not None and bool((value == 1).all())
