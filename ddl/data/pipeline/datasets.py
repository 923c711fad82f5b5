"""The last transformations of a data set of batches, on the host."""

import os

import numpy as np
import tensorflow as tf

_BATCHES_AHEAD = 4
"""Prefetched batches: enough to keep the devices busy when one batch takes longer than others."""

_LEAST_THREADS = 8
"""Threads of a pipeline on few cores. tf.data makes as many calls of a map at a time, and with two
calls it wakes a thread for nearly each example."""


def joined(dataset: tf.data.Dataset, batches: int, replicas: int) -> tf.data.Dataset:
    """Joins the batches of each update, with the rows grouped by replica.

    Args:
      dataset: Dicts of the rows of this process in a batch, [rows, …], grouped by replica.
      batches: Number of batches of an update.
      replicas: Number of replicas of this process.
    """

    @tf.autograph.experimental.do_not_convert  # converting takes longer than tracing
    def by_replica(element: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {name: of_update(rows) for name, rows in element.items()}

    def of_update(rows: tf.Tensor) -> tf.Tensor:
        order = grouped_by_replica(batches, rows.shape[1], replicas)
        return tf.gather(tf.reshape(rows, [len(order), *rows.shape[2:]]), order)

    return dataset.batch(batches, drop_remainder=True).map(by_replica)


def grouped_by_replica(batches: int, rows: int, replicas: int) -> np.ndarray:
    """Returns the order that groups the rows of several batches by replica, int [batches · rows].

    Args:
      batches: Number of batches, one after the other.
      rows: Rows of each batch, grouped by replica.
      replicas: Number of replicas.
    """
    return np.arange(batches * rows).reshape(batches, replicas, -1).transpose(1, 0, 2).ravel()


def finished(dataset: tf.data.Dataset, ahead: bool = True) -> tf.data.Dataset:
    """Returns the data set with the options of all of ddl's.

    Args:
      dataset: The rows of this process.
      ahead: Whether to make batches before they are needed.
    """
    options = tf.data.Options()
    options.deterministic = True
    # The data set holds exactly this process's rows. Auto-sharding would split them again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # A map and a buffer need no autotuning. Destroying an iterator waits for the autotuner's thread
    # to wake up, which it does ever less often, down to once a minute.
    options.autotune.enabled = False
    options.threading.private_threadpool_size = max(_LEAST_THREADS, os.cpu_count() or 1)
    return (dataset.prefetch(_BATCHES_AHEAD) if ahead else dataset).with_options(options)
