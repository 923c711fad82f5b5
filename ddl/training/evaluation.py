"""Evaluation: means over a data set, each example counted once."""

from typing import Any

import tensorflow as tf
from absl import logging

from ddl.data.batch import Batch
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.path import on_host_if_placed
from ddl.errors import DataError
from ddl.step.compiled import Compiler
from ddl.step.loss import Loss
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.state import TrainingState
from ddl.training.loop.device_errors import device_errors
from ddl.training.loop.stale_traces import explaining_stale_traces


class Evaluation:
    """Means of loss and metrics over the data of a pipeline.

    It serves all strategies but parameter servers (`CoordinatedEvaluation`).
    """

    def __init__(
        self,
        objective: Loss,
        pipeline: BatchPipeline | None,
        strategy: tf.distribute.Strategy,
        compiler: Compiler,
    ):
        """Keeps the arguments; traces at the first run.

        Args:
          objective: Gives the metric sums.
          pipeline: The evaluation data; None if each call of `run_on` gives its own.
          strategy: The strategy.
          compiler: Compiles the sums of a batch.
        """
        objective.form(training=False)  # not while the loop is traced
        self._compiler = compiler
        self._objective = objective
        self._pipeline: Any = pipeline
        self._strategy = strategy
        self._iterator: Any = None
        self._is_traced = False

    def run(self, state: TrainingState) -> dict[str, float]:
        """Returns the means by name for the present weights. Eager, cross-replica context.

        Args:
          state: The training's state; schedules of layers and tasks follow it.

        Raises:
          DataError: If the data cannot be read, or if their feature "weight" is always 0.
          ConfigError: If the task cannot be evaluated.
        """
        # Every evaluation reads the first epoch, whether or not the run was resumed: later epochs
        # of a mixture, or of examples that draw by their seed, are others. One iterator serves
        # all. It is not kept while in use: after an error its position would be wrong.
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            self._pipeline.count_examples()
            iterator = self._pipeline.iterator(self._strategy, repeats=True)
        means = self._means(iterator, state)
        self._iterator = iterator
        return means

    def run_on(self, pipeline: BatchPipeline, state: TrainingState) -> dict[str, float]:
        """Returns the means over a pipeline, which is not kept; see `run`.

        Args:
          pipeline: Not resident; with the batch size, the features and the `always_full` of all
            earlier calls, so that one trace serves all.
          state: As in `run`.
        """
        self._pipeline = pipeline
        try:
            return self._means(pipeline.iterator(self._strategy, 0), state)
        finally:
            self._pipeline = None

    def _means(self, iterator: Any, state: TrainingState) -> dict[str, float]:
        with data_errors(self._pipeline.source), device_errors(), explaining_stale_traces():
            number = tf.constant(self._pipeline.steps_per_epoch, tf.int64)
            arguments = (iterator, number, state.batches, state.step)
            if not self._is_traced:
                # Not by the call: TensorFlow counts the traces of all evaluations of a process
                # together, and warns of frequent ones.
                self._compiler.tracing(lambda: self._loop.get_concrete_function(*arguments))
                self._is_traced = True
            sums = self._loop(*arguments)
        check_some_weight(sums, self._objective)
        return self._objective.form(False).metrics.means(sums)

    @tf.function(autograph=False)
    @fixed_order_of_sums()
    def _loop(
        self, iterator: Any, num_batches: tf.Tensor, position: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns the metric sums over `num_batches` batches: float64 [size]."""
        pipeline = self._pipeline

        def replica_sums(batch: Batch) -> tf.Tensor:
            return self._compiler.of_pass(lambda: sums_of(batch))

        def sums_of(batch: Batch) -> tf.Tensor:
            features = pipeline.examples(batch)
            microbatch = pipeline.microbatch(
                batch, features, training=False, step=step, position=position
            )
            with microbatch.forward():
                return self._objective(features, training=False)[1]

        def add_batch(turn: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with on_host_if_placed(self._strategy):
                number, following = tf.cast(turn, tf.int64), turn + 1
            batch = pipeline.next_batch(iterator, self._strategy, number)
            per_replica = self._strategy.run(replica_sums, args=(batch,))
            return following, sums + self._strategy.reduce("SUM", per_replica, axis=None)

        def goes_on(turn: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            with on_host_if_placed(self._strategy):
                return turn < end

        # int32, which stays on the host: GPUs would send each answer to the host, which waits.
        with on_host_if_placed(self._strategy):
            end = tf.cast(num_batches, tf.int32)
        start = (tf.constant(0), self._objective.form(False).metrics.zeros())
        return tf.while_loop(goes_on, add_batch, start)[1]


def check_some_weight(sums: tf.Tensor, objective: Loss) -> None:
    """Raises DataError if all evaluation data have weight 0, which leaves the means undefined.

    Weights from the task may depend on the model and all be 0 for a while: this is only logged.

    Args:
      sums: Metric sums, float64 [size].
      objective: The objective that made the sums.
    """
    if sums[0] != 0:
        return
    if objective.form(False).weighs:
        logging.warning("The task gives all evaluation data the weight 0, so the means are NaN.")
        return
    raise DataError(
        "Feature 'weight' is 0 for all examples of the evaluation data, so the mean is undefined. "
        "Give a positive weight to the examples to evaluate on."
    )
