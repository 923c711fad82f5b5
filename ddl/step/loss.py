"""The scalar objective and the metric sums, made from a task's per-example losses.

A mean over a replica or a microbatch would ignore the weights of the others. `Loss` therefore forms
sums, divided by the constant global batch size B to keep their magnitude. After the all-reduce, the
gradient is divided once by the global Σ weight / B.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.layers.broadcasting import with_rank
from ddl.layers.normalization import has_global_moments
from ddl.step.metric_sums import MetricSums, check_output, sums_of
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, PerExample, Task, has_step

Features: TypeAlias = dict[str, tf.Tensor]
"""The features of a microbatch by name, [rows, …], with "weight"."""

OfExamples: TypeAlias = Callable[..., tf.Tensor]
"""Takes features and `training`, and returns a float tensor [batch, …]."""

OfExample: TypeAlias = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""Changes the gradients of one example, a tensor of each variable's shape."""


class Form(NamedTuple):
    """Findings of the probes about a loss in training, or in an evaluation.

    Attributes:
      metrics: Layout of the metric sums.
      entry: Shape and dtype of the losses of an example.
      weighs: Whether the task returns weights, so that Σ weight may differ from the batch size.
      gathers: Whether the loss calls `ddl.gather`.
      tables: The variables of which the loss looks up single rows (`ddl.step.rows.tables_in`).
      layers: Layers of the task, without BatchNormalization that takes no moments of the batch.
      placing: Which draws follow the rows (`ddl.random.placing`); None if that is unknown.
      written: Names of variables that the loss writes, but for moments of BatchNormalization.
    """

    metrics: MetricSums
    entry: tf.TensorSpec
    weighs: bool
    gathers: bool
    tables: Mapping[int, bool]
    layers: Sequence[keras.layers.Layer]
    placing: Mapping[Any, int] | None
    written: Sequence[str]

    @property
    def entries(self) -> int:
        """Number of losses of an example."""
        return math.prod(self.entry.shape)


@dataclasses.dataclass(eq=False)
class Loss:
    """The objective Σ weight·loss / B of a replica's microbatch, and its metric sums.

    Attributes:
      task: The task.
      function: The loss function; it takes features and `training`.
      global_batch_size: B above.
      replicas: Number of replicas.
      form: What the probes found (`Form`); None before.
      each: Changes the gradient of each example before they are added up (`OfExample`), or None.
      where: Name of the loss in errors.
    """

    task: Task
    function: LossFunction
    global_batch_size: int
    replicas: int
    form: Any = None
    each: Any = None

    @property
    def where(self) -> str:
        """See above."""
        return f"{type(self.task).__name__}.{getattr(self.function, '__name__', 'per_example')}"

    def __call__(self, features: Features, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
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
        """
        weighed, sums, weight = self.weighed(features, training)
        objective = tf.reduce_sum(weighed)
        for own_loss in self.losses_of_layers() if training else ():
            # A mean over the replica's examples, which gets their total weight.
            objective += tf.reduce_sum(weight) * tf.cast(own_loss, objective.dtype)
        return objective / tf.cast(self.global_batch_size, objective.dtype), sums

    def weighed(self, features: Features, training: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns weight·loss of each entry, the metric sums, and the weights; see `__call__`.

        Returns:
          Weighted losses, [batch, …]; the metric sums; and the weights, [batch, …].
        """
        form: Form = self.form
        features = dict(features)
        example_weight = features.pop("weight")
        if (current := microbatch.current()) is not None:
            current.placing = form.placing
        output = self.function(features, training=training)
        check_output(output, self.where, example_weight.shape[0])
        if {"loss", *output.metrics} != set(form.metrics.metrics):
            raise ConfigError(
                f"{self.where} must always return the metrics {list(form.metrics.metrics[1:])}, "
                f"but it returned {list(output.metrics)}."
            )
        # Weights and sums need more than half precision.
        half = output.loss.dtype in (tf.float16, tf.bfloat16)
        loss = tf.cast(output.loss, tf.float32) if half else output.loss
        weight = tf.broadcast_to(
            with_rank(tf.cast(example_weight, loss.dtype), loss.shape.rank), tf.shape(loss)
        )
        if output.weight is not None:
            weight *= with_rank(tf.cast(output.weight, loss.dtype), loss.shape.rank)
        # If all weights are the constant 1, forward and backward pass skip the multiplication.
        value: Any = tf.get_static_value(example_weight)
        is_one = output.weight is None and value is not None and bool((value == 1).all())
        weighed = loss if is_one else tf.math.multiply_no_nan(loss, weight)
        sums = sums_of(form.metrics, loss, output, None if is_one else weight, example_weight)
        return weighed, sums, weight

    def of_examples(self, features: Features, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the loss of each example whose gradient `each` changes. Replica context.

        An example with several losses, as of tokens, has the gradient of their weighted mean, so
        that a limit of `each` means the same for any number of losses. The sum of the gradients is
        divided by the sum of the weights of the data, and not of those of the losses: in DP-SGD an
        example then changes the result by at most limit / Σ weight of the data, whatever weights
        the task returns.

        Returns:
          The losses times the weights of the data, [rows]; and the metric sums, with the sum of the
          weights of the data at the end.
        """
        of_data = features["weight"]
        weighed, sums, weight = self.weighed(features, training)
        self.losses_of_layers()  # which are refused
        rows = weighed.shape[0]
        losses = tf.reduce_sum(tf.reshape(weighed, [rows, -1]), axis=1)
        if self.form.entries > 1:
            total = tf.reduce_sum(tf.reshape(weight, [rows, -1]), axis=1)
            losses = tf.math.divide_no_nan(losses * tf.cast(of_data, losses.dtype), total)
        return losses, tf.concat([sums, [tf.reduce_sum(tf.cast(of_data, tf.float64))]], axis=0)

    def losses_of_layers(self) -> Sequence[tf.Tensor]:
        """Returns the losses from `add_loss` or activity regularizers in the last call.

        Raises:
          ConfigError: If they would depend on the number of replicas.
        """
        current, refused = microbatch.current(), ""
        if has_step(self.task):
            # A loss may call a model several times, and Keras keeps the losses of the last call.
            own = [loss for layer in layers_of(self.task) for loss in layer._losses]
            refused = "in a task with a `step`"
        else:
            # Keras lists penalties on weights last, which `add_regularization` adds once.
            model = self.task.model
            penalized = [v for v in model.trainable_variables if v.regularizer is not None]
            own = model.losses[: len(model.losses) - len(penalized)]
            alone = current is None or current.own_moments or self.replicas == 1
            if current is not None and current.mask is not None:
                refused = "with padding or weights, since they are means over all rows of a replica"
            elif not alone and any(map(has_global_moments, model._flatten_layers())):
                # While one replica waits at a collective, the others overwrite Keras's list.
                refused = "with BatchNormalization over several replicas, which Keras mixes up"
        if own and refused:
            raise ConfigError(
                f"{self.where}: the model has losses of its own (add_loss, or an activity "
                f"regularizer), which is impossible {refused}. Return these losses from the task."
            )
        return own


@dataclasses.dataclass
class Values:
    """A function of the examples in the form of a loss; equal to that of an equal function."""

    function: OfExamples

    def __post_init__(self) -> None:
        self.__name__ = getattr(self.function, "__name__", "")

    def __call__(self, features: dict[str, Any], training: bool) -> PerExample:
        """Returns the values as losses, [batch, …]."""
        return PerExample(tf.convert_to_tensor(self.function(features, training=training)))
