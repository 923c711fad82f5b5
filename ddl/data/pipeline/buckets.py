"""Batches by bucket: the loop computes each with its features cut to the bucket's length."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from ddl.data.pipeline.batch import Batch
from ddl.data.pipeline.datasets import finished
from ddl.data.pipeline.pipeline import BatchPipeline
from ddl.data.varying.bucketed import BucketedSource

_Result = TypeVar("_Result")


class Buckets:
    """The buckets of a pipeline's batches. Cross-replica context.

    The number of a batch's bucket is on the host, and the same for all replicas and workers.
    """

    def __init__(self, pipeline: BatchPipeline, source: BucketedSource):
        """Keeps the arguments.

        Args:
          pipeline: The pipeline.
          source: Its source.
        """
        self._pipeline = pipeline
        self._source = source

    def iterator(self, first_batch: int) -> Any:
        """Returns an endless iterator of buckets, int32 [], from a batch on. Eager."""
        pipeline = self._pipeline
        numbers = self._source.buckets(
            pipeline.global_batch_size,
            first_batch,
            seed=pipeline.order_seed,
            shuffle=pipeline.shuffle,
        )
        with tf.device("CPU:0"):
            return iter(finished(numbers))

    def each(
        self,
        bucket: tf.Tensor,
        batch: Batch,
        strategy: tf.distribute.Strategy,
        compute: Callable[[Batch], _Result],
    ) -> _Result:
        """Computes a batch in the trace of its bucket. In a graph.

        Args:
          bucket: Number of the bucket, int32 [].
          batch: The batch, its features in the shape of the last boundary.
          strategy: Strategy of the training.
          compute: Traced for each bucket; returns tensors of the same shapes.
        """

        def branch(boundary: int) -> Callable[[], _Result]:
            return lambda: compute(self._cut(batch, boundary, strategy))

        return tf.switch_case(bucket, [branch(each) for each in self._source.boundaries])

    def _cut(self, batch: Batch, boundary: int, strategy: tf.distribute.Strategy) -> Batch:
        if boundary == self._source.width:
            return batch

        def cut(rows: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {
                name: each[:, :boundary] if name in self._source.features else each
                for name, each in rows.items()
            }

        held = tf.nest.flatten(batch.rows)
        if isinstance(held[0], tf.Tensor):  # all rows of this process, for all its replicas
            return batch._replace(rows=cut(batch.rows))
        return batch._replace(rows=strategy.run(cut, (batch.rows,)))


def buckets_of(pipelines: Mapping[str, BatchPipeline]) -> Buckets | None:
    """Returns the buckets of a training's batches; None if they are of one shape.

    Batches of several sources, or several batches an update, have the shape of the last boundary.
    """
    if len(pipelines) != 1:
        return None
    (pipeline,) = pipelines.values()
    source = pipeline.source
    if not isinstance(source, BucketedSource) or pipeline.batches_per_update != 1:
        return None
    return Buckets(pipeline, source)
