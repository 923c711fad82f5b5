"""Asynchronous training and its evaluation, on workers that a coordinator gives functions to.

The coordinator cuts the batches up to the end of a loop into short ranges and hands each range to a
worker that is free. For every batch of it the worker reads the weights from the parameter servers,
computes a gradient and has it applied there at once. It does not wait for the others, so that the
weights may have moved between its reading and its update by what the others did meanwhile: about
one update for each other worker. (Dean et al. 2012, "Large Scale Distributed Deep Networks"; Li et
al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".)

Which batches there are follows from seed and step as on any devices; who computes which, and in
which order they are applied, does not. Each batch is begun with once, by one worker: what a worker
had begun with when it was lost is left out, and made up for by a batch more.
"""

import itertools
import time
from typing import Any

import tensorflow as tf

from ddl.data import BatchPipeline
from ddl.microbatch import explaining_stale_traces
from ddl.objective import Objective
from ddl.random import batch_counter
from ddl.shared_state import SharedState, count_natively
from ddl.step import UpdateStep
from ddl.training_state import TrainingState

# Ranges a worker and loop: shorter ones leave workers idle for less time at its end, and cost more.
_RANGES_PER_WORKER = 8
_PAUSE = 0.001


class CoordinatedLoop:
    """Stands in for `ddl.training_loop.TrainingLoop`. Eager, on the chief.

    Attributes:
      trace_count: How often what workers do was traced.
    """

    def __init__(self, update: UpdateStep, state: TrainingState):
        """Traces nothing yet; has each worker take the arrays of the data.

        Args:
          update: Makes one update.
          state: Where training begins.

        Raises:
          ConfigError: If the data are no arrays, or more than can be sent.
        """
        self.trace_count = 0
        self._update = update
        self._workers = _Workers(update.strategy, update.pipeline)
        count_natively(update.optimizer)
        slots = _RANGES_PER_WORKER * self._workers.number
        self._shared = SharedState(update.strategy, state, update.optimizer, slots)

    def trace(self, state: TrainingState) -> None:
        """As `TrainingLoop.trace`."""
        self._shared.write(state)
        self._run_range(0, int(state.batches), 0)
        self._workers.wait()

    def run(self, state: TrainingState, end: int) -> TrainingState:
        """As `TrainingLoop.run`; ends before `end` if updates were skipped or lost.

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

    def reset(self) -> None:
        """As `TrainingLoop.reset`: nothing is held."""

    def _run_range(self, slot: int, first: int, count: int) -> None:
        numbers = [tf.constant(number, tf.int64) for number in (slot, first, count)]
        self._workers.schedule(self._make_updates, *numbers)

    @tf.function(autograph=False)
    def _make_updates(
        self, data: Any, slot: tf.Tensor, first: tf.Tensor, count: tf.Tensor
    ) -> tf.Tensor:
        """Updates with batches first, first + 1, …, `count` of them. On a worker."""
        self.trace_count += 1
        arrays = next(data)

        def updated(number: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._shared.begin(slot)]):
                before = self._shared.at(first + number)
                batch = self._update.pipeline.batch(arrays, before.batches)
                after = self._update(batch, {}, before)
                with tf.control_dependencies(self._shared.add(before, after)):
                    return number + 1

        # Another worker may have begun, and been lost: what it began with is not made twice.
        return tf.while_loop(
            lambda number: number < count,
            lambda number: self._update.traced_apart(lambda: updated(number)),
            (self._shared.begun(slot),),
            parallel_iterations=1,
        )


class CoordinatedEvaluation:
    """Stands in for `ddl.evaluation.Evaluation`: workers share the batches. Eager, on the chief."""

    def __init__(
        self, objective: Objective, pipeline: BatchPipeline, strategy: tf.distribute.Strategy
    ):
        """As `Evaluation`.

        Raises:
          ConfigError: If the data are no arrays, or more than can be sent.
        """
        self._objective = objective
        self._pipeline = pipeline
        self._strategy = strategy
        self._workers = _Workers(strategy, pipeline)

    def run(self) -> dict[str, float]:
        """As `Evaluation.run`. A part is counted once, however often workers are lost with it.

        Raises:
          WorkerLost: If a parameter server was lost.
        """
        total = self._pipeline.steps_per_epoch
        ranges = min(total, _RANGES_PER_WORKER * self._workers.number)
        bounds = [total * number // ranges for number in range(ranges + 1)]
        parts = [
            self._workers.schedule(
                self._sums_of, tf.constant(start, tf.int64), tf.constant(stop, tf.int64)
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        self._workers.wait()
        return self._objective.metrics.means(tf.add_n([part.fetch() for part in parts]))

    @tf.function(autograph=False)
    def _sums_of(self, data: Any, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        """Metric sums over batches from `start` to before `stop`. On a worker."""
        arrays, pipeline = next(data), self._pipeline

        def replica_sums(element: Any, batch: tf.Tensor) -> tf.Tensor:
            features = pipeline.examples(element, {})
            with pipeline.microbatch(features, batch_counter(batch), training=False).forward():
                return self._objective(features, training=False)[1]

        def add_batch(batch: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            args = (pipeline.batch(arrays, batch), batch)
            own = self._strategy.run(replica_sums, args=args)
            return batch + 1, sums + self._strategy.reduce("SUM", own, axis=None)

        initial = (start, self._objective.metrics.zeros())
        return tf.while_loop(lambda batch, sums: batch < stop, add_batch, initial)[1]


class _Workers:
    """The workers of a strategy, each with the arrays of a data set."""

    def __init__(self, strategy: tf.distribute.Strategy, pipeline: BatchPipeline):
        # One for all: TensorFlow gives the same coordinator for the same strategy.
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.number = strategy._num_workers
        arrays = pipeline.packed_arrays()

        # A data set of one element that repeats: taking it copies nothing, and TensorFlow makes it
        # again on a worker that is back.
        def held() -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(dict(arrays)).repeat()

        self._data = iter(self._coordinator.create_per_worker_dataset(held))

    def schedule(self, function: Any, *args: tf.Tensor) -> Any:
        """Has `function(data, *args)` run on a worker, again if it is lost; gives the result."""
        with explaining_stale_traces():
            return self._coordinator.schedule(function, args=(self._data, *args))

    def wait(self) -> None:
        """Until all is done. A stalled process is noticed elsewhere (ddl.parameter_servers)."""
        while not self._coordinator.done():
            time.sleep(_PAUSE)
