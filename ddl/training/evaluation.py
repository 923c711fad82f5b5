"""Evaluation: means over a data set, each example counted once."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl.data.batch import Batch
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.path import on_host_if_placed
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError
from ddl.metrics import OfAllOutputs
from ddl.metrics.of_all_outputs import checked_corpus_metrics
from ddl.step.compiled import Compiler
from ddl.step.loss import Loss
from ddl.step.moving_statistics import restoring
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.state import TrainingState
from ddl.step.weight_average import WeightAverages
from ddl.tasks.parts import copies_of, layers_of
from ddl.tasks.task import Task
from ddl.training.asynchronous import CoordinatedEvaluation, sums_of
from ddl.training.device_errors import device_errors
from ddl.training.prediction import Predictions, form_of


class Evaluations:
    """Means of loss and metrics, and figures of all outputs. Eager, cross-replica context.

    Attributes:
      names: Names of the figures of the trainer's own evaluation data; empty without any.
    """

    def __init__(
        self,
        own: BatchPipeline | None,
        loss_of: Callable[[BatchPipeline], Loss],
        compiler: Compiler,
        corpus_metrics: Any,
        predictions: Predictions,
        strategy: tf.distribute.Strategy,
    ):
        """Probes the loss on the trainer's own evaluation data; traces nothing.

        Args:
          own: The trainer's own evaluation data.
          loss_of: Probes the loss of an evaluation on data.
          compiler: Compiles the sums of a batch.
          corpus_metrics: As `ddl.Trainer` takes it.
          predictions: Computes the outputs that `corpus_metrics` read.
          strategy: The strategy.

        Raises:
          ConfigError: If the task cannot be evaluated, `corpus_metrics` has another type, two
            figures have one name, or there are no outputs.
          DataError: If the data lack what `corpus_metrics` read.
        """
        self._own, self._loss_of, self._compiler = own, loss_of, compiler
        self._strategy, self._workers = strategy, Workers(strategy)
        self._predictions = predictions
        self._corpus_metrics = checked_corpus_metrics(corpus_metrics)
        self._is_asynchronous = traits_of(strategy).asynchronous
        self._loss: Any = None
        self._pipeline: Any = None  # while tracing
        self._iterator: Any = None  # of the trainer's own data
        self._coordinated: CoordinatedEvaluation | None = None
        self.names: Sequence[str] = ()
        if self._corpus_metrics:
            predictions.check_predicts("Trainer.corpus_metrics")
        if own is None:
            return
        with self._workers.failing_together():
            self._loss = loss_of(own)
        if self._is_asynchronous:
            self._coordinated = CoordinatedEvaluation(self._loss, own, strategy)
        names = self._loss.form(False).metrics.names
        for metric in self._corpus_metrics:
            predictions.features_of(own.source, metric.features)
            if taken := sorted(set(metric.names) & set(names)):
                raise ConfigError(
                    f"Trainer.corpus_metrics has the figures {', '.join(taken)}, which the task "
                    "reports too. Rename them."
                )
            names = (*names, *metric.names)
        self.names = names

    def run(self, pipeline: BatchPipeline, state: TrainingState) -> dict[str, float]:
        """Returns the figures of data by name, for the present weights.

        Args:
          pipeline: The data, the trainer's own or others.
          state: The training's state; schedules of layers and tasks follow it.

        Raises:
          DataError: If the data cannot be read, or if their feature "weight" is always 0.
          ConfigError: If the task cannot be evaluated.
        """
        pipeline.count_examples()
        if self._loss is None:
            self._loss = self._loss_of(pipeline)
        if self._is_asynchronous:
            known = self._coordinated if pipeline is self._own else None
            sums = (known or CoordinatedEvaluation(self._loss, pipeline, self._strategy)).sums(
                state
            )
        else:
            sums = self._sums_on_devices(pipeline, state)
        form = self._loss.form(False)
        if sums[0] == 0:  # the weight of all examples
            # Weights of the task may depend on the model and all be 0 for a while.
            if not form.weighs:
                raise DataError(
                    "Feature 'weight' is 0 for all examples of the evaluation data, so the mean is "
                    "undefined. Give a positive weight to the examples to evaluate on."
                )
            logging.warning("The task gives all evaluation data the weight 0: the means are NaN.")
        means = form.metrics.means(sums)
        for metric in self._corpus_metrics:
            means |= self._of_all_outputs(metric, pipeline, state, means["loss"])
        return means

    def _sums_on_devices(self, pipeline: BatchPipeline, state: TrainingState) -> tf.Tensor:
        """Returns the metric sums over the data: float64 [size]."""
        is_own = pipeline is self._own
        with data_errors(pipeline.source), device_errors():
            # Every evaluation reads the first epoch, whether or not the run was resumed: later
            # epochs of a mixture, or of examples that draw by their seed, are others. The own
            # iterator is not kept while in use: after an error its position would be wrong.
            iterator = self._iterator if is_own else None
            if iterator is None:
                iterator = pipeline.iterator(self._strategy, repeats=is_own)
            if is_own:
                self._iterator = None
            number = tf.constant(pipeline.steps_per_epoch, tf.int64)
            form = repr((is_own, form_of(pipeline)))
            arguments = (form, iterator, number, state.batches, state.step)
            # Traced not by the call: TensorFlow counts the traces of all evaluations of a process
            # together, and warns of frequent ones.
            self._pipeline = pipeline
            self._compiler.tracing(lambda: self._sums.get_concrete_function(*arguments))
            self._pipeline = None  # which would keep the data alive
            sums = self._sums(*arguments)
        if is_own:
            self._iterator = iterator
        return sums

    @tf.function(autograph=False)
    @fixed_order_of_sums()
    def _sums(
        self,
        form: str,
        iterator: Any,
        num_batches: tf.Tensor,
        position: tf.Tensor,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the metric sums over `num_batches` batches, traced for data of one form."""
        pipeline, loss, strategy = self._pipeline, self._loss, self._strategy

        def of_replica(batch: Batch) -> tf.Tensor:
            return self._compiler.of_pass(lambda: sums_of(pipeline, loss, batch, position, step))

        def add_batch(turn: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with on_host_if_placed(strategy):
                number, following = tf.cast(turn, tf.int64), turn + 1
            batch = pipeline.next_batch(iterator, strategy, number)
            per_replica = strategy.run(of_replica, args=(batch,))
            return following, sums + strategy.reduce("SUM", per_replica, axis=None)

        def goes_on(turn: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            with on_host_if_placed(strategy):
                return turn < end

        # int32, which stays on the host: GPUs would send each answer to the host, which waits.
        with on_host_if_placed(strategy):
            end = tf.cast(num_batches, tf.int32)
        return tf.while_loop(
            goes_on, add_batch, (tf.constant(0), loss.form(False).metrics.zeros())
        )[1]

    def _of_all_outputs(
        self, metric: OfAllOutputs, pipeline: BatchPipeline, state: TrainingState, loss: float
    ) -> dict[str, float]:
        """Returns the figures of one metric, which the chief computes, on all workers."""
        if not math.isfinite(loss):  # which the run reports
            return dict.fromkeys(metric.names, math.nan)
        own: dict[str, float] = {}
        chief = self._workers.is_chief
        found = self._predictions.outputs(pipeline.source, state, metric, keeps=chief)
        with self._workers.failing_together():
            if found is not None:
                own = metric(*found)
        return {n: self._workers.broadcast_float(own.get(n, 0.0)) for n in metric.names}


class EvaluationWeights:
    """Gives the model the averages of its weights within a `with` block, if a trainer keeps some.

    An evaluation never changes the run.
    """

    def __init__(self, averages: WeightAverages | None, task: Task):
        """Keeps the averages that the trainer keeps, if any; changes no variable."""
        # A layer of the user's may write these whether it trains or not.
        kind = keras.layers.BatchNormalization
        moving = [layer for layer in layers_of(task) if not isinstance(layer, kind)]
        every = [v.value for layer in moving for v in layer._non_trainable_variables]
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
