"""From a task's per-example losses to the one number that is differentiated, and the sums.

A mean taken on a replica or a microbatch would weigh it by itself; so only sums are formed
here, divided by the constant global batch size B to keep their magnitude, and the trainer
divides by the global Σ weight / B once, after the reduce.
"""

from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from ddl import microbatch
from ddl.broadcasting import broadcasts, with_rank
from ddl.errors import ConfigError
from ddl.metrics import MetricSums
from ddl.model_checks import has_synchronized_layers
from ddl.onednn import loses_kernels_in_loops
from ddl.task import PerExample, Task

# Names that a line of metrics.jsonl has besides the task's metrics.
_RESERVED = (
    *("loss", "step", "epoch", "split", "learning_rate", "gradient_norm"),
    *("examples_per_second", "loss_scale", "skipped_updates", "rewinds", "gradient_noise_scale"),
)


# More than one, so that a mean over the batch or a squeeze shows in the shapes.
_PROBE_ROWS = 2


class Objective:
    """Σ weight·loss / B of a replica's microbatch, with its metric sums."""

    def __init__(
        self,
        task: Task,
        element_spec: dict[str, tf.TensorSpec],
        global_batch_size: int,
        strategy: tf.distribute.Strategy,
    ):
        """Runs the task once on symbolic examples, which builds a model not built yet.

        Args:
          task: The task.
          element_spec: One example by feature name, without the batch dimension.
          global_batch_size: B above.
          strategy: In whose scope a model not built yet gets its variables.

        Raises:
          ConfigError: If what the task returns cannot be weighed and summed exactly.
        """
        self._task = task
        self._global_batch_size = global_batch_size
        self._replicas = strategy.num_replicas_in_sync
        output, graph = self._trace(element_spec, strategy)
        self.metrics = MetricSums(["loss", *output.metrics])
        self.task_weighs = output.weight is not None
        """Whether the task gives weights of its own, so that Σ weight is not the batch size."""
        self.loses_kernels_in_loops = loses_kernels_in_loops(graph, strategy)
        """Whether its gradient is to be computed in a graph of its own (`ddl.onednn`)."""
        self._penalized = [v for v in task.model.trainable_variables if v.regularizer is not None]

    def __call__(
        self, features: dict[str, tf.Tensor], training: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Replica context.

        Args:
          features: The batch; "weight", float32 [batch], is 0 for padding.
          training: As in `Task.per_example`.

        Returns:
          The objective, float32 [] or float64 []; and the metric sums, float64,
          whose "loss" is the task's alone, without penalties on weights and losses of layers.
        """
        features = dict(features)
        example_weight = features.pop("weight")
        output = self._task.per_example(features, training)
        self._check(output, example_weight.shape[0])
        # Weights and sums want more than half precision.
        half = output.loss.dtype in (tf.float16, tf.bfloat16)
        loss = tf.cast(output.loss, tf.float32) if half else output.loss
        weight = tf.broadcast_to(
            with_rank(tf.cast(example_weight, loss.dtype), loss.shape.rank), tf.shape(loss)
        )
        if output.weight is not None:
            weight *= with_rank(tf.cast(output.weight, loss.dtype), loss.shape.rank)
        # Where all weights are one by design, nothing is multiplied, forwards or backwards.
        is_one = output.weight is None and _is_constant_one(example_weight)
        weighed = loss if is_one else tf.math.multiply_no_nan(loss, weight)
        objective = tf.reduce_sum(weighed)
        for own_loss in self._losses_of_layers() if training else ():
            # Such a loss is a mean over the replica's examples, so it counts as they do.
            objective += tf.reduce_sum(weight) * tf.cast(own_loss, loss.dtype)
        sums = self.metrics.sums({"loss": loss, **output.metrics}, None if is_one else weight)
        return objective / tf.cast(self._global_batch_size, loss.dtype), sums

    def _losses_of_layers(self) -> Sequence[tf.Tensor]:
        """What layers added by `add_loss` or an activity regularizer in the last call."""
        losses = self._task.model.losses
        # Keras lists the penalties on weights last. They do not depend on the examples and are
        # added after the reduce, once (ddl.gradients.add_regularization).
        own = losses[: len(losses) - len(self._penalized)]
        if own and self._replicas > 1 and has_synchronized_layers(self._task.model):
            # While one replica waits for the others, these overwrite the list that Keras keeps.
            raise ConfigError(
                "the model adds losses of its own (add_loss, or an activity regularizer) and has "
                "synchronized BatchNormalization, which Keras mixes up on several replicas. Return "
                "these losses from the task instead."
            )
        current = microbatch.current()
        if own and current is not None and current.mask is not None:
            logging.log_first_n(
                logging.WARNING,
                "The model adds losses of its own (add_loss, or an activity regularizer). They are "
                "means over all rows of a replica, padding too: in a batch that is not full they "
                "depend on the number of replicas. Return them from the task to have them weighed.",
                1,
            )
        return own

    def _trace(
        self, element_spec: dict[str, tf.TensorSpec], strategy: tf.distribute.Strategy
    ) -> tuple[PerExample, tf.Graph]:
        batch = {
            name: tf.TensorSpec([_PROBE_ROWS, *spec.shape], spec.dtype, name)
            for name, spec in element_spec.items()
        }
        outputs: list[PerExample] = []

        @tf.function(autograph=False)
        def probe(features: dict[str, tf.Tensor]) -> None:
            features = dict(features)
            weight = features.pop("weight")
            outputs.append(self._task.per_example(features, training=False))
            self._check(outputs[-1], weight.shape[0])

        with strategy.scope():
            graph = probe.get_concrete_function(batch).graph
        return outputs[-1], graph

    def _check(self, output: PerExample, batch: int) -> None:
        name = f"{type(self._task).__name__}.per_example"
        if not isinstance(output, PerExample):
            raise ConfigError(
                f"{name} returned {type(output).__name__}; it returns a ddl.PerExample with one "
                "loss for each example"
            )
        if output.loss.shape.rank == 0:
            raise ConfigError(
                f"{name} returned a scalar loss. It returns one loss for each example, shape "
                "[batch], so that padding, masks and several replicas weigh exactly: leave out "
                "the reduce_mean, or give a Keras loss reduction=None."
            )
        if output.loss.shape[0] != batch:
            raise ConfigError(
                f"{name} returned losses of shape {tuple(output.loss.shape)} for a batch of "
                f"{batch}; the first dimension is the batch"
            )
        if output.weight is not None and not broadcasts(output.weight.shape, output.loss.shape):
            raise ConfigError(
                f"{name}: the weight has shape {tuple(output.weight.shape)}, the loss "
                f"{tuple(output.loss.shape)}; it is one weight for each loss, or for the first "
                "dimensions of the losses"
            )
        for metric, values in output.metrics.items():
            if metric in _RESERVED:
                raise ConfigError(f"{name}: a metric cannot be called {metric!r}; ddl writes that")
            if not values.shape.is_compatible_with(output.loss.shape):
                raise ConfigError(
                    f"{name}: the metric {metric!r} has shape {tuple(values.shape)}, the loss "
                    f"{tuple(output.loss.shape)}; both hold one value for each example"
                )


def _is_constant_one(weight: tf.Tensor) -> bool:
    value = tf.get_static_value(weight)
    return value is not None and bool((value == 1).all())
