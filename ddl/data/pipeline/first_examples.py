"""The first examples of a run, for checks before training."""

import numpy as np
import tensorflow as tf

from ddl.data.arrays import is_in_memory
from ddl.data.order import batch_indices
from ddl.data.pipeline.pipeline import BatchPipeline
from ddl.data.source import IndexedSource
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError


def first_examples(
    pipeline: BatchPipeline, count: int, strategy: tf.distribute.Strategy
) -> dict[str, tf.Tensor]:
    """Returns the first examples of a run, with or without "weight". Eager.

    A stream is read from its beginning and shuffled as in training. In a cluster each worker
    reads examples of its own rows, since it may not have any others.

    Args:
      pipeline: The pipeline of the data.
      count: Number of examples. Examples repeat if the data, or a worker's rows, have fewer.
      strategy: Strategy of the training.

    Returns:
      Features [count, …].
    """
    if is_in_memory(pipeline.source):  # avoids the start-up time of tf.data
        with tf.device("CPU:0"):
            indices, _ = batch_indices(
                tf.zeros([], tf.int64),
                num_examples=pipeline.num_examples,
                global_batch_size=count,
                seed=pipeline.order_seed,
                shuffle=pipeline.shuffle,
            )
            arrays = pipeline.source.features
            return {name: tf.constant(arrays[name][indices.numpy()]) for name in arrays}
    # A stream would fill its shuffle buffer for these few.
    shuffle = pipeline.shuffle and isinstance(pipeline.source, IndexedSource)
    own = pipeline.own_rows(strategy)
    if Workers(strategy).number > 1 and own is not None:
        batches = pipeline.source.batches(
            pipeline.global_batch_size, 0, seed=pipeline.order_seed, shuffle=shuffle, rows=own
        )
        first = next(iter(batches.take(1)))
        return {name: tf.gather(rows, np.arange(count) % len(own)) for name, rows in first.items()}
    # One batch of `count` rows if the source allows this size; else a multiple of B rows.
    size = count
    try:
        pipeline.source.steps_per_epoch(size)
    except ConfigError:
        size = pipeline.global_batch_size * -(-count // pipeline.global_batch_size)
    batches = pipeline.source.batches(
        size, 0, seed=pipeline.order_seed, shuffle=shuffle, rows=np.arange(count)
    )
    return dict(next(iter(batches.take(1))))
