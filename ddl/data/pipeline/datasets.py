"""The last transformations of a data set of batches, on the host."""

import os

import numpy as np
import tensorflow as tf

from ddl.devices.wide_integers import narrowed

_BATCHES_AHEAD = 4
"""Prefetched batches: enough to keep the devices busy when one batch takes longer than others."""

_LEAST_THREADS = 8
"""Threads of a pipeline on few cores. tf.data makes as many calls of a map at a time, and with two
calls it wakes a thread for nearly each example."""

_HOST_INTEGERS = (tf.int32, tf.uint32)


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
        # Batches one after the other, their rows grouped by replica, become one group a replica.
        places = np.arange(batches * rows.shape[1]).reshape(batches, replicas, -1)
        order = places.transpose(1, 0, 2).ravel()
        return tf.gather(tf.reshape(rows, [len(order), *rows.shape[2:]]), order)

    return dataset.batch(batches, drop_remainder=True).map(by_replica)


def as_sent(dataset: tf.data.Dataset, widens: bool, is_full: bool) -> tf.data.Dataset:
    """Prepares batches that are copied to devices with a memory of their own.

    Args:
      dataset: Dicts of features and "weight".
      widens: Whether int32 and uint32 features become int64, until `as_received`. TensorFlow keeps
        int32 in host memory: such a feature would be copied to a GPU, back to the host, and to the
        GPU again.
      is_full: Whether all weights are 1. They are not sent.
    """
    left_out = {"weight"} if is_full else set()
    wide = {n for n, spec in dataset.element_spec.items() if spec.dtype in _HOST_INTEGERS}
    wide = wide if widens else set()

    @tf.autograph.experimental.do_not_convert
    def sent(element: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        element = {name: rows for name, rows in element.items() if name not in left_out}
        return element | {name: tf.cast(element[name], tf.int64) for name in wide}

    return dataset.map(sent) if left_out or wide else dataset


def as_received(
    element: dict[str, tf.Tensor], spec: dict[str, tf.TensorSpec]
) -> dict[str, tf.Tensor]:
    """Returns features in the dtypes of `spec`, which `as_sent` may have widened."""
    changed = {n for n, rows in element.items() if n in spec and rows.dtype != spec[n].dtype}
    return element | {name: narrowed(element[name], spec[name].dtype) for name in changed}


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
