"""Evaluation: means over a data set, each example counted once."""

from typing import Any

import tensorflow as tf

from ddl.data import BatchPipeline
from ddl.data.checks import data_errors
from ddl.microbatch import explaining_stale_traces
from ddl.objective import Objective
from ddl.random import batch_counter


class Evaluation:
    """Means of loss and metrics over the data of a pipeline, on any strategy."""

    def __init__(
        self, objective: Objective, pipeline: BatchPipeline, strategy: tf.distribute.Strategy
    ):
        """Takes them; traces at the first run."""
        self._objective = objective
        self._pipeline = pipeline
        self._strategy = strategy
        self._iterator: Any = None

    def run(self) -> dict[str, float]:
        """The means, of the model as it is. Eager, cross-replica context.

        Raises:
          DataError: If the data cannot be read.
        """
        # The input repeats without end and its length is known, so that one iterator serves
        # every evaluation. It is let go while in use, lest an error leave it half-way.
        iterator, self._iterator = self._iterator, None
        iterator = iterator or self._pipeline.iterator(self._strategy, 0)
        with data_errors(), explaining_stale_traces():
            sums = self._loop(iterator, tf.constant(self._pipeline.steps_per_epoch, tf.int64))
        self._iterator = iterator
        return self._objective.metrics.means(sums)

    @tf.function(autograph=False)
    def _loop(self, iterator: Any, num_batches: tf.Tensor) -> tf.Tensor:
        """Metric sums over so many batches."""
        pipeline = self._pipeline
        resident = pipeline.resident_arrays(self._strategy)

        def replica_sums(element: Any, arrays: Any, batch: tf.Tensor) -> tf.Tensor:
            features = pipeline.examples(element, arrays)
            with pipeline.microbatch(features, batch_counter(batch), training=False).forward():
                return self._objective(features, training=False)[1]

        def add_batch(batch: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            args = (next(iterator), resident, batch)
            per_replica = self._strategy.run(replica_sums, args=args)
            return batch + 1, sums + self._strategy.reduce("SUM", per_replica, axis=None)

        start = (tf.zeros([], tf.int64), self._objective.metrics.zeros())
        return tf.while_loop(lambda batch, sums: batch < num_batches, add_batch, start)[1]
