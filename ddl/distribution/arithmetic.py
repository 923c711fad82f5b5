"""Kernels that choose the order of their additions by shapes alone."""

import os

import tensorflow as tf

from ddl.errors import ConfigError

_THREADS = "TF_NUM_INTRAOP_THREADS"
_MAKES_KERNELS_ANEW = "TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE"

_REORDERING = (
    *("arithmetic_optimization", "remapping", "layout_optimizer", "loop_optimization"),
    *("function_optimization", "shape_optimization", "implementation_selector"),
    *("scoped_allocator_optimization", "auto_mixed_precision", "pin_to_host_optimization"),
)
"""Passes of the graph optimizer, as `tf.config.optimizer.set_experimental_options` names them."""


def fix_arithmetic() -> None:
    """Makes every kernel of this process compute in one thread, as the graph says.

    With several threads, Eigen and oneDNN cut products, convolutions and sums into as many parts.
    Operations beside each other still run in parallel. The passes of TensorFlow's graph optimizer
    that join, reorder or replace operations by what surrounds them are off. Those that compute
    constants and remove what is not needed stay on: most operations of a small shard are of this
    kind. They see the same graph of a shard on any number of replicas
    (`ddl.layers.shards.tree.exchanged`).

    TensorFlow keeps its oneDNN kernels in memory. By default it makes those of some gradients, such
    as that of a convolution's filter, anew in each call. Shards call them often, and these kernels
    are small.

    Raises:
      ConfigError: If TensorFlow already started with several threads.
    """
    _take_one_thread()
    os.environ.setdefault(_MAKES_KERNELS_ANEW, "false")  # read at the first convolution
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_REORDERING, False))


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
