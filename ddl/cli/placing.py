"""Set-up of a run's devices and strategy from the flags."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddl.cli.flags import FLAGS, parse_on_device
from ddl.cli.loading import load_config, prepare

if TYPE_CHECKING:
    from ddl.run.placement import Placement

_ONE_DNN = "TF_ENABLE_ONEDNN_OPTS"


def build_placement(gpus: Sequence[int] | None) -> "Placement | None":
    """Loads the config, configures the devices and builds the strategy.

    Args:
      gpus: Indices of the GPUs to use; None means all.

    Returns:
      Where to train; None if this process served as a parameter server until training ended.

    Raises:
      DdlError: If the config, the devices or the cluster cannot be used.
    """
    from ddl.distribution.slurm import check_cluster, join_cluster

    prepare()
    # Each of the two checks what it can before TensorFlow is imported.
    if check_cluster(FLAGS.cluster) == "tf_config":
        return_freed_memory_of_server()
    load_config(FLAGS)

    from ddl.distribution import parameter_servers
    from ddl.distribution.communication import Communication
    from ddl.distribution.devices import configure_devices
    from ddl.distribution.strategies import build_strategy, choose_strategy
    from ddl.distribution.timeouts import ClusterTimeouts
    from ddl.distribution.traits import TRAITS
    from ddl.run.placement import Placement

    join_cluster(FLAGS.cluster)
    configure_devices(
        num_virtual_devices=FLAGS.num_virtual_devices,
        gpus=gpus,
        memory_growth=FLAGS.memory_growth,
        deterministic_ops=FLAGS.deterministic_ops,
        virtual_gpu_memory=FLAGS.virtual_gpu_memory,
    )
    choose_tf32(FLAGS.tf32 == "on")
    communication = Communication(
        cross_device_ops=FLAGS.cross_device_ops,
        num_packs=FLAGS.num_packs,
        bytes_per_pack=FLAGS.bytes_per_pack,
        collectives=FLAGS.collectives,
        timeout_seconds=FLAGS.communication_timeout,
    )
    timeouts = ClusterTimeouts(
        join=FLAGS.join_timeout, peer=FLAGS.peer_timeout, stall=FLAGS.stall_timeout
    )
    name = choose_strategy(FLAGS.strategy)
    traits = TRAITS[name]
    if traits.asynchronous and parameter_servers.serves_here():
        parameter_servers.serve(timeouts)
        return None
    return Placement(
        build_strategy(name, communication, timeouts),
        communication,
        FLAGS.steps_per_loop,
        parse_on_device(FLAGS.data_on_device),
        FLAGS.jit_compile,
        FLAGS.shard_optimizer_state,
    )


def return_freed_memory_of_server() -> None:
    """Makes a parameter server return freed memory to the system. Before TensorFlow is imported.

    With oneDNN, TensorFlow's allocator for CPUs keeps all memory that it ever took: the copies of
    variables that are made while they are initialized and saved. A server applies updates, which
    oneDNN does not speed up. A value that the environment has already stays.
    """
    from ddl.distribution.tf_config import cluster_role

    if cluster_role().kind == "ps":
        os.environ.setdefault(_ONE_DNN, "0")


def choose_tf32(enabled: bool) -> None:
    """Sets the rounding of float32 on GPUs; without GPUs, TensorFlow's default stays."""
    import tensorflow as tf

    from ddl.precision import set_tf32

    if tf.config.get_visible_devices("GPU"):
        set_tf32(enabled)
