"""Kernels that choose the order of their additions by shapes alone."""

import os

import tensorflow as tf

from ddl.errors import ConfigError

_THREADS = "TF_NUM_INTRAOP_THREADS"


def fix_arithmetic() -> None:
    """Makes every kernel of this process compute in one thread, as the graph says.

    With several threads, Eigen and oneDNN cut products, convolutions and sums into as many parts.
    Operations beside each other still run in parallel. TensorFlow's graph optimizer is off, since
    it joins, reorders and replaces operations by what surrounds them, and gives up by time.

    Raises:
      ConfigError: If TensorFlow already started with several threads.
    """
    _take_one_thread()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _take_one_thread() -> None:
    given = tf.config.threading.get_intra_op_parallelism_threads()
    if given == 1 or (given == 0 and os.environ.get(_THREADS) == "1"):
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    except RuntimeError as error:
        raise ConfigError(
            "Trainer.batch_shards needs kernels of one thread each, but TensorFlow already started "
            "with several threads in a kernel. Call ddl.distribution.configure_devices("
            "same_bits=True) before the first TensorFlow operation, or set the environment "
            f"variable {_THREADS}=1."
        ) from error
