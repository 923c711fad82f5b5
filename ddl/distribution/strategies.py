"""Construction of the `tf.distribute` strategy of a run.

`configure_devices` must run before TensorFlow creates its devices, `build_strategy` before the
model is built.
"""

from collections.abc import Callable

import tensorflow as tf

from ddl.choices import (
    STRATEGIES,
    StrategyName,
)
from ddl.devices.path import path_for
from ddl.distribution.communication import Communication, cross_device_ops
from ddl.distribution.multi_worker import build_multi_worker_strategy
from ddl.distribution.parameter_servers import (
    build_parameter_server_strategy,
)
from ddl.distribution.tf_config import cluster_role
from ddl.distribution.timeouts import ClusterTimeouts
from ddl.distribution.tpu import build_tpu_strategy
from ddl.distribution.traits import strategy_of_cluster
from ddl.errors import ConfigError, check_choice

_TPU_TIMEOUT = 10.0


def build_strategy(
    name: StrategyName = "auto",
    communication: Communication | None = None,
    timeouts: ClusterTimeouts | None = None,
) -> tf.distribute.Strategy:
    """Builds the strategy called `name` over all devices that this process sees.

    `auto` selects `parameter_server` if TF_CONFIG names parameter servers, `multi_worker_mirrored`
    if it names several workers, `mirrored` on several GPUs, and `one_device` otherwise. With
    `parameter_server` only the chief calls this function; workers and parameter servers call
    `ddl.distribution.parameter_servers.serve`.

    Args:
      name: Name of the strategy.
      communication: Options for the communication of gradients; None for the defaults.
      timeouts: Timeouts of the cluster; None for the defaults. `tpu` waits at most 10 s instead of
        a longer `join`.

    Raises:
      ConfigError: If the name is unknown, or TF_CONFIG or an option does not fit the strategy.
      DeviceError: If `tpu` finds no TPU.
      WorkerLost: If another process of the cluster does not join in time.
      AddressTaken: If another process uses this worker's port.
    """
    check_choice("strategy", name, STRATEGIES)
    communication, timeouts = communication or Communication(), timeouts or ClusterTimeouts()
    name = choose_strategy(name)
    return BUILDERS[name](communication, timeouts)


def choose_strategy(name: StrategyName) -> StrategyName:
    """Returns the strategy that `auto` selects, or else `name`.

    Must run before any other operation of the process.

    Raises:
      ConfigError: If `name` is `auto` and TF_CONFIG is malformed.
    """
    if name != "auto":
        return name
    role = cluster_role()
    if of_cluster := strategy_of_cluster(len(role.workers), "ps" in role.cluster):
        return of_cluster
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return "mirrored"
    return "one_device"


# ------------------------------------------------------------ builders


def _one_device(communication: Communication, timeouts: ClusterTimeouts) -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy(_devices()[0])


def _mirrored(communication: Communication, timeouts: ClusterTimeouts) -> tf.distribute.Strategy:
    devices = _devices()
    all_reduce = cross_device_ops(communication, path_for(devices))
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=all_reduce)


def _central_storage(
    communication: Communication, timeouts: ClusterTimeouts
) -> tf.distribute.Strategy:
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=_devices(), parameter_device="CPU:0"
    )


def _multi_worker_mirrored(
    communication: Communication, timeouts: ClusterTimeouts
) -> tf.distribute.Strategy:
    if len(cluster_role().workers) < 2:
        raise ConfigError(
            "multi_worker_mirrored needs the environment variable TF_CONFIG with at least two "
            "workers. `python -m ddl.launch --num_workers=2 -- …` sets it. For a single "
            "process use --strategy=mirrored."
        )
    return build_multi_worker_strategy(communication.options(), timeouts)


def _parameter_server(
    communication: Communication, timeouts: ClusterTimeouts
) -> tf.distribute.Strategy:
    return build_parameter_server_strategy(timeouts)


def _tpu(communication: Communication, timeouts: ClusterTimeouts) -> tf.distribute.Strategy:
    return build_tpu_strategy(min(timeouts.join, _TPU_TIMEOUT))


def _devices() -> list[str]:
    """Returns the names of this process's GPUs; of its CPU devices if there are none."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


BUILDERS: dict[StrategyName, Callable[[Communication, ClusterTimeouts], tf.distribute.Strategy]] = {
    "one_device": _one_device,
    "mirrored": _mirrored,
    "multi_worker_mirrored": _multi_worker_mirrored,
    "parameter_server": _parameter_server,
    "central_storage": _central_storage,
    "tpu": _tpu,
}
