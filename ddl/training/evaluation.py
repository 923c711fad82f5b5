"""Evaluation: means over a data set, each example counted once.

Here `tf.distribute` is at its plainest: the iterator of a distributed data set gives each replica
its rows (`ddl.step.replicas.distributed_iterator`), `strategy.run` computes sums on each replica,
and `strategy.reduce` adds them up.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.devices import restoring
from ddl.distribution.path import on_host_if_placed
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError
from ddl.metrics import CorpusMetric
from ddl.metrics.corpus_metric import checked_corpus_metrics
from ddl.optimizers.weight_average import WeightAverages
from ddl.step.fixed_order import fixed_order_of_sums
from ddl.step.loss import Loss
from ddl.step.replicas import distributed_iterator
from ddl.step.state import TrainingState
from ddl.tasks.parts import copies_of, layers_of, own_variables_of
from ddl.tasks.task import Task
from ddl.training.checks import check_has_outputs
from ddl.training.prediction import Predictions, TracedByForm, forward, joined, spec_of
from ddl.training.probes import Probes


class Evaluations:
    """Means of loss and metrics, and figures of all outputs. Eager, cross-replica context.

    Attributes:
      names: Names of the figures of the trainer's own evaluation data; empty without any.
    """

    def __init__(
        self,
        own: BatchPipeline | None,
        probes: Probes,
        corpus_metrics: Any,
        predictions: Predictions,
    ):
        """Probes the loss on the trainer's own evaluation data; traces nothing.

        Args:
          own: The trainer's own evaluation data.
          probes: The probes of the task.
          corpus_metrics: As `ddl.Trainer` takes it.
          predictions: Computes the outputs that `corpus_metrics` read.

        Raises:
          ConfigError: If the task cannot be evaluated, `corpus_metrics` has another type, two
            figures have one name, or there are no outputs.
          DataError: If the data lack what `corpus_metrics` read.
        """
        self._own, self._probes, self._predictions = own, probes, predictions
        self._strategy, self._compiler = predictions.strategy, predictions.compiler
        self._workers = Workers(self._strategy)
        self._corpus_metrics = checked_corpus_metrics(corpus_metrics)
        self._losses: dict[Any, Loss] = {}  # by the features of the data
        self._sums = TracedByForm(self._sums_of, self._compiler)
        self._iterators: dict[BatchPipeline, Any] = {}  # of the trainer's own data
        self._of_corpora = [name for metric in self._corpus_metrics for name in metric.names]
        self.names = () if own is None else (*self._loss(own).form.metrics.names, *self._of_corpora)
        for metric in self._corpus_metrics:
            check_has_outputs(probes.task, "Trainer.corpus_metrics")
            if own is not None:
                predictions.check_features(own.element_spec, metric.features or ())

    def run(self, pipeline: BatchPipeline, state: TrainingState) -> dict[str, float]:
        """Returns the figures of data by name, for the present weights.

        Every evaluation reads the first epoch, whether or not the run was resumed: later epochs of
        a mixture, or of examples that draw by their seed, are others.

        Args:
          pipeline: The data, the trainer's own or others.
          state: The training's state; schedules of layers and tasks follow it.

        Raises:
          DataError: If the data cannot be read, or if their feature "weight" is always 0.
          ConfigError: If the task cannot be evaluated.
        """
        pipeline.count_examples()
        form, is_own = self._loss(pipeline).form, pipeline is self._own
        # Not kept while in use: after an error its position would be wrong.
        iterator = self._iterators.pop(pipeline, None)
        iterator = iterator or distributed_iterator(pipeline, self._strategy, repeats=is_own)
        count = tf.constant(pipeline.steps_per_epoch, tf.int32)
        sums = self._sums(pipeline, iterator, count, state.step)
        if is_own:
            self._iterators[pipeline] = iterator
        # Weights of the task may depend on the model and all be 0 for a while: means are NaN.
        if sums[0] == 0 and not form.weighs:
            raise DataError(
                "Feature 'weight' is 0 for all examples of the evaluation data, so the mean is "
                "undefined. Give a positive weight to the examples to evaluate on."
            )
        means = form.metrics.means(sums)
        for metric in self._corpus_metrics:
            means |= self._corpus_metric(metric, pipeline, state, means["loss"])
        return means

    def _loss(self, pipeline: BatchPipeline) -> Loss:
        """Returns the loss; probes it on the first data that have these features.

        Raises:
          ConfigError: If two figures have one name.
        """
        spec = spec_of(pipeline)
        if spec not in self._losses:
            with self._workers.failing_together():
                loss = self._probes.loss(pipeline)
                names = [*loss.form.metrics.names, *self._of_corpora]
                if twice := [name for name in names if names.count(name) > 1]:
                    raise ConfigError(
                        f"Two figures are called {twice[0]!r}: of the task, or of "
                        "Trainer.corpus_metrics. Rename one."
                    )
            self._losses[spec] = loss
        return self._losses[spec]

    @fixed_order_of_sums()
    def _sums_of(
        self, pipeline: BatchPipeline, iterator: Any, count: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns the metric sums over batches: float64 [size]. Cross-replica context, in a graph.

        Args:
          pipeline: The data.
          iterator: Their distributed iterator.
          count: Number of batches, int32 [], which stays on the host: a GPU would make it wait.
          step: Updates that the training has made, int64 [].
        """
        strategy, loss = self._strategy, self._loss(pipeline)

        def sums_of(batch: Batch) -> tf.Tensor:
            features, microbatch = forward(pipeline, batch, step)
            with microbatch.forward():
                return loss(features, training=False)[1]

        def of_replica(batch: Batch) -> tf.Tensor:
            return self._compiler.of_pass(lambda: sums_of(batch))

        def add_batch(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with on_host_if_placed(strategy):
                of_run = tf.cast(number, tf.int64)
            batch = pipeline.next_batch(iterator, strategy, of_run)
            per_replica = strategy.run(of_replica, args=(batch,))
            return number + 1, sums + strategy.reduce("SUM", per_replica, axis=None)

        first = tf.zeros([], tf.int32), loss.form.metrics.zeros()
        return tf.while_loop(lambda number, _: number < count, add_batch, first)[1]

    def _corpus_metric(
        self, metric: CorpusMetric, pipeline: BatchPipeline, state: TrainingState, loss: float
    ) -> dict[str, float]:
        """Returns the figures of one metric, which the chief computes, on all workers.

        Examples of weight 0 are left out.
        """
        if not math.isfinite(loss):  # which the run reports
            return dict.fromkeys(metric.names, math.nan)
        source, every, own = pipeline.source, list[Any](), dict[str, float]()
        names = tuple(source.element_spec if metric.features is None else metric.features)
        features = tuple(dict.fromkeys([*names, "weight"]))
        for outputs, beside in self._predictions.batches(source, state, features):
            counts, kept = beside["weight"] != 0, (outputs, {name: beside[name] for name in names})
            if self._workers.is_chief:
                every.append(tf.nest.map_structure(lambda x, counts=counts: x[counts], kept))
        with self._workers.failing_together():
            if self._workers.is_chief:
                own = metric(*joined(every))
        return {n: self._workers.broadcast_float(own.get(n, 0.0)) for n in metric.names}


class EvaluationWeights:
    """Gives the model the averages of its weights within a `with` block, if a trainer keeps some.

    An evaluation never changes the run.
    """

    def __init__(self, averages: WeightAverages | None, task: Task):
        """Keeps the averages that the trainer keeps, if any; changes no variable."""
        # A layer or a loss of the user's may write these whether it trains or not.
        kind = keras.layers.BatchNormalization
        layers = layers_of(task)
        moving = [layer for layer in layers if not isinstance(layer, kind)]
        every = [v.value for layer in moving for v in layer._non_trainable_variables]
        every += own_variables_of(task, layers)
        self._written = [copy for variable in every for copy in copies_of(variable)]
        self._averages = averages
        self._blocks = 0
        self._restoring = ExitStack()

    @contextmanager
    def applied(self, averaged: bool = True) -> Iterator[None]:
        """Assigns the weights for evaluation within the `with` block.

        Weights become their averages, if kept and if `averaged` is True. Afterwards all values are
        restored bit for bit. A nested block changes nothing. Blocks of generators may end in any
        order: the last one that ends restores the values. Eager, cross-replica context, on all
        workers.
        """
        if not self._blocks:
            with ExitStack() as stack:
                stack.enter_context(restoring(self._written))
                if averaged and self._averages is not None:
                    stack.enter_context(self._averages.applied())
                self._restoring = stack.pop_all()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._restoring.close()

    def check_not_applied(self) -> None:
        """Raises ConfigError within `applied`."""
        if self._blocks:
            raise ConfigError(
                "The model holds the evaluation weights. Leave the evaluation_weights() block, and "
                "read the iterators of predict_batches to their end or close() them, before "
                "training, saving or restoring."
            )
