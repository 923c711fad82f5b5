"""Construction of the `tf.distribute` strategy of a run.

`configure_devices` must run before TensorFlow creates its devices, `build_strategy` before the
model is built.
"""

import tensorflow as tf

from ddl.choices import (
    STRATEGIES,
    StrategyName,
)
from ddl.distribution.communication import Communication, cross_device_ops
from ddl.distribution.multi_worker import build_multi_worker_strategy
from ddl.distribution.parameter_servers import (
    build_parameter_server_strategy,
)
from ddl.distribution.tf_config import cluster_place
from ddl.distribution.timeouts import ClusterTimeouts
from ddl.distribution.tpu import build_tpu_strategy
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
    if name == "multi_worker_mirrored":
        if len(cluster_place().workers) < 2:
            raise ConfigError(
                "multi_worker_mirrored needs the environment variable TF_CONFIG with at least two "
                "workers. `python -m ddl.launch --num_workers=2 -- …` sets it. For a single "
                "process use --strategy=mirrored."
            )
        return build_multi_worker_strategy(communication.options(), timeouts)
    if name == "parameter_server":
        return build_parameter_server_strategy(timeouts)
    if name == "tpu":
        return build_tpu_strategy(min(timeouts.join, _TPU_TIMEOUT))
    accelerators = [device.name for device in tf.config.list_logical_devices("GPU")]
    devices = accelerators or [device.name for device in tf.config.list_logical_devices("CPU")]
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy(devices[0])
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(
            devices,
            cross_device_ops=cross_device_ops(communication, on_gpu=bool(accelerators)),
        )
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=devices, parameter_device="CPU:0"
    )


def choose_strategy(name: StrategyName) -> StrategyName:
    """Returns the strategy that `auto` selects, or else `name`.

    Must run before any other operation of the process.

    Raises:
      ConfigError: If `name` is `auto` and TF_CONFIG is malformed.
    """
    if name != "auto":
        return name
    place = cluster_place()
    if "ps" in place.cluster:
        return "parameter_server"
    if len(place.workers) > 1:
        return "multi_worker_mirrored"
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return "mirrored"
    return "one_device"
