"""Global batches made on the host, to compare with the batches of the replicas."""

import tensorflow as tf

from ddl.data import BatchPipeline


def host_dataset(pipeline: BatchPipeline, first_batch: int = 0) -> tf.data.Dataset:
    """Returns the endless data set of a pipeline's batches first_batch, first_batch + 1, …"""
    return pipeline.source.batches(
        pipeline.global_batch_size, first_batch, seed=pipeline.seed, shuffle=pipeline.shuffle
    )
