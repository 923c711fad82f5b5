"""Asynchronous training and evaluation on workers to which a coordinator schedules functions.

The coordinator splits the batches of a loop into short ranges and schedules each range on a free
worker. For each batch the worker reads the weights from the parameter servers, computes a gradient
and applies it there at once. Workers do not wait for each other. Between a worker's read and its
update the others therefore change the weights, by about one update per other worker. (Dean et al.
2012, "Large Scale Distributed Deep Networks"; Li et al. 2014, "Scaling Distributed Machine Learning
with the Parameter Server".)

Seed and step determine the batches, as under any strategy. They determine neither the worker of a
batch nor the order of the updates. Each batch is started at most once. A batch in progress on a
lost worker is left out and replaced by a later batch.
"""

import itertools
import time
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.step.loss import Loss
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.asynchronous.batches import WorkerBatches
from ddl.training.asynchronous.state import SharedState, count_atomically
from ddl.training.evaluation import check_some_weight
from ddl.training.loop.stale_traces import explaining_stale_traces

# Ranges per worker and loop. More ranges leave workers idle for less time at the end of the loop,
# at a higher scheduling cost.
_RANGES_PER_WORKER = 8
_PAUSE = 0.001  # seconds


class CoordinatedLoop:
    """The replacement of `ddl.training.loop.TrainingLoop`. Eager, on the chief.

    Attributes:
      trace_count: Number of traces of the workers' function.
    """

    def __init__(self, update: TrainStep, state: TrainingState):
        """Sends the data arrays to each worker; traces no update.

        Args:
          update: Makes one update.
          state: State to start from.

        Raises:
          ConfigError: If workers can neither be sent the data nor read them.
        """
        self.trace_count = 0
        self._is_traced = False
        self._update = update
        (pipeline,) = update.pipelines.values()
        self._batches = WorkerBatches(pipeline)
        self._workers = _Workers(update.strategy, self._batches)
        (optimizer,) = update.optimizers.values()
        count_atomically(optimizer)
        slots = _RANGES_PER_WORKER * self._workers.number
        self._shared = SharedState(update.strategy, state, optimizer, slots)

    def trace(self, state: TrainingState) -> None:
        """Traces the workers' function; see `TrainingLoop.trace`."""
        if self._is_traced:
            return
        self._shared.write(state)
        self._run_range(0, int(state.batches), 0)
        self._workers.wait()
        self._is_traced = True

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """Trains to step `end`, or less far if updates were skipped or lost; returns the state.

        Raises:
          WorkerLost: If a parameter server was lost.
          ConfigError: If the task cannot be trained.
        """
        self._shared.write(state)
        first, total = int(state.batches), end - int(state.step)
        ranges = min(total, self._shared.slots)
        bounds = [first + total * number // ranges for number in range(ranges + 1)]
        for slot, (start, stop) in enumerate(itertools.pairwise(bounds)):
            self._run_range(slot, start, stop - start)
        self._workers.wait()
        return self._shared.read(state, total)

    def _run_range(self, slot: int, first: int, count: int) -> None:
        numbers = [tf.constant(number, tf.int64) for number in (slot, first, count)]
        rows = self._batches.rows_of(first, count)
        self._workers.schedule(self._make_updates, rows, *numbers)

    @tf.function(autograph=False)
    def _make_updates(
        self, data: Any, rows: Any, slot: tf.Tensor, first: tf.Tensor, count: tf.Tensor
    ) -> tf.Tensor:
        """Makes updates with `count` batches, from number `first` on. On a worker."""
        self.trace_count += 1
        rows = self._batches.received(rows)

        def updated(number: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._shared.begin(slot)]):
                before = self._shared.at(first + number)
                batch = self._batches.batch(data, rows, number, before.batches)
                after = self._update({"": batch}, before)
                with tf.control_dependencies(self._shared.add(before, after)):
                    return number + 1

        # A lost worker may have started this range: its batches are not computed twice.
        return tf.while_loop(
            lambda number: number < count,
            updated,
            (self._shared.begun(slot),),
            parallel_iterations=1,
        )


class CoordinatedEvaluation:
    """The replacement of `Evaluation`: workers share the batches. Eager, on the chief."""

    def __init__(self, objective: Loss, pipeline: BatchPipeline, strategy: tf.distribute.Strategy):
        """Sends the data arrays to each worker; traces no evaluation.

        Args:
          objective: Gives the metric sums.
          pipeline: The evaluation data.
          strategy: The strategy, with parameter servers.

        Raises:
          ConfigError: If workers can neither be sent the data nor read them.
        """
        objective.form(training=False)  # not while the loop is traced
        self._objective = objective
        self._pipeline = pipeline
        self._strategy = strategy
        self._batches = WorkerBatches(pipeline)
        self._workers = _Workers(strategy, self._batches)

    def run(self, state: TrainingState) -> dict[str, float]:
        """Returns the means; see `Evaluation.run`.

        Each range counts once, even if workers computing it are lost.

        Raises:
          DataError: If all examples have weight 0.
          WorkerLost: If a parameter server was lost.
        """
        self._pipeline.count_examples()
        total = self._pipeline.steps_per_epoch
        assert total is not None
        ranges = min(total, _RANGES_PER_WORKER * self._workers.number)
        bounds = [total * number // ranges for number in range(ranges + 1)]
        parts = [
            self._workers.schedule(
                self._sums_of,
                self._batches.rows_of(start, stop - start),
                *(tf.constant(number, tf.int64) for number in (start, stop)),
                state.batches,
                state.step,
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        self._workers.wait()
        sums = tf.add_n([part.fetch() for part in parts])
        check_some_weight(sums, self._objective)
        return self._objective.form(False).metrics.means(sums)

    @tf.function(autograph=False)
    @fixed_order_of_sums()
    def _sums_of(
        self,
        data: Any,
        rows: Any,
        start: tf.Tensor,
        stop: tf.Tensor,
        position: tf.Tensor,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Returns metric sums over the batches [start, stop): float64 [size]. On a worker."""
        pipeline, rows = self._pipeline, self._batches.received(rows)

        def replica_sums(batch: Batch) -> tf.Tensor:
            features = pipeline.examples(batch)
            microbatch = pipeline.microbatch(
                batch, features, training=False, step=step, position=position
            )
            with microbatch.forward():
                return self._objective(features, training=False)[1]

        def add_batch(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch = self._batches.batch(data, rows, number - start, number)
            own = self._strategy.run(replica_sums, args=(batch,))
            return number + 1, sums + self._strategy.reduce("SUM", own, axis=None)

        initial = (start, self._objective.form(False).metrics.zeros())
        return tf.while_loop(lambda number, sums: number < stop, add_batch, initial)[1]


class _Workers:
    """The workers of a strategy, each with the arrays of a data set that are sent to it.

    Attributes:
      number: Number of workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, batches: WorkerBatches):
        # TensorFlow returns the same coordinator for the same strategy.
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.number = strategy._num_workers
        self._source = batches.source
        # TensorFlow remakes the data set on a restarted worker.
        self._data = iter(self._coordinator.create_per_worker_dataset(batches.dataset))

    def schedule(self, function: Any, *args: Any) -> Any:
        """Schedules `function(data, *args)` on a worker, again if it is lost; returns the result.

        The result is TensorFlow's `RemoteValue`.
        """
        with explaining_stale_traces(), data_errors(self._source):
            return self._coordinator.schedule(function, args=(self._data, *args))

    def wait(self) -> None:
        """Waits until all functions are done.

        `ddl.training.asynchronous.watch` detects a stalled process.

        Raises:
          DataError: If a worker could not read the data.
        """
        with data_errors(self._source):
            while not self._coordinator.done():
                time.sleep(_PAUSE)
