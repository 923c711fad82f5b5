"""Set-up of a run's devices and strategy from the flags."""

import gc
import os
import sys
from typing import TYPE_CHECKING

from absl import flags

from ddl.cli.flags import gpus_of

if TYPE_CHECKING:
    from ddl.run.plan import Placement


def build_placement(values: flags.FlagValues) -> "Placement | None":
    """Loads the config, configures the devices and builds the strategy.

    Args:
      values: The parsed flags of `ddl.main`.

    Returns:
      Where to train; None if this process served a chief, as a worker or parameter server.

    Raises:
      DdlError: If the config, the devices or the cluster cannot be used.
    """
    from ddl import config
    from ddl.config.registry import user_packages
    from ddl.distribution.cluster import join_cluster

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides TensorFlow's start-up messages
    # Cluster and config are checked before TensorFlow is imported, except for a Slurm step.
    join_cluster(values.cluster)
    return_freed_memory_of_server()
    # A config imports the user's own modules, from the current folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    imports, before = "tensorflow" not in sys.modules, gc.get_threshold()
    gc.set_threshold(100_000)  # collections take a fifth of TensorFlow's import for nothing
    try:
        config.load(
            values.gin_file,
            values.gin_param or (),
            values.gin_search_path or (),
            values.gin_allow_unused,
        )
    finally:
        gc.set_threshold(*before)
    if imports and not user_packages():  # whose modules may leave garbage
        gc.freeze()  # later collections pass over what was imported

    import tensorflow as tf

    from ddl.distribution import parameter_servers
    from ddl.distribution.cluster import ClusterTimeouts
    from ddl.distribution.devices import configure_devices
    from ddl.distribution.strategies import build_strategy, choose_strategy
    from ddl.distribution.traits import TRAITS
    from ddl.precision import set_tf32
    from ddl.run.plan import Placement

    configure_devices(
        values.num_virtual_devices, gpus_of(values), deterministic_ops=values.deterministic_ops
    )
    if tf.config.get_visible_devices("GPU"):
        set_tf32(values.tf32 == "on")
    timeouts, limit = ClusterTimeouts(), values.worker_timeout
    if limit is not None:  # no reason to wait longer for a machine that does not answer
        timeouts = ClusterTimeouts(limit, min(limit, timeouts.peer), limit)
    name = choose_strategy(values.strategy)
    if TRAITS[name].asynchronous and parameter_servers.serves_here():
        parameter_servers.serve(timeouts)
        return None
    strategy = build_strategy(name, timeouts)
    if TRAITS[name].asynchronous:
        parameter_servers.watch_tasks(timeouts)
    return Placement(
        strategy,
        values.steps_per_loop,
        jit_compile=values.jit_compile,
        shard_optimizer_state=values.shard_optimizer_state,
    )


def return_freed_memory_of_server() -> None:
    """Makes a parameter server return freed memory to the system. Before TensorFlow is imported.

    With oneDNN, TensorFlow's allocator for CPUs keeps all memory that it ever took: the copies of
    variables that are made while they are initialized and saved. A server applies updates, which
    oneDNN does not speed up. A value that the environment has already stays.
    """
    from ddl.distribution.cluster import cluster_role

    if cluster_role().kind == "ps":
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
