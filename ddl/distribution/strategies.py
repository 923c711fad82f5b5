"""Construction of the `tf.distribute` strategy of a run.

`configure_devices` must run before TensorFlow creates its devices, `build_strategy` before the
model is built.
"""

import os
from collections.abc import Callable

import tensorflow as tf

from ddl.choices import STRATEGIES, StrategyName
from ddl.distribution.addresses import ask
from ddl.distribution.cluster import ClusterTimeouts, cluster_role
from ddl.distribution.multi_worker import build_multi_worker_strategy
from ddl.distribution.parameter_servers import build_parameter_server_strategy
from ddl.distribution.path import path_for
from ddl.errors import DeviceError, check_choice


def build_strategy(
    name: StrategyName = "auto", timeouts: ClusterTimeouts | None = None
) -> tf.distribute.Strategy:
    """Builds the strategy called `name` over all devices that this process sees.

    `auto` selects `parameter_server` if TF_CONFIG names parameter servers, `multi_worker_mirrored`
    if it names several workers, `mirrored` on several GPUs, and `one_device` otherwise. With
    `parameter_server` only the chief calls this function; workers and parameter servers call
    `ddl.distribution.parameter_servers.serve`.

    Args:
      name: Name of the strategy.
      timeouts: Timeouts of the cluster; None for the defaults. `tpu` waits at most 10 s instead of
        a longer `join`.

    Raises:
      ConfigError: If the name is unknown, or TF_CONFIG does not fit the strategy.
      DeviceError: If `tpu` finds no TPU.
      WorkerLost: If another process of the cluster does not join in time.
      AddressTaken: If another process uses this worker's port.
    """
    check_choice("strategy", name, STRATEGIES)
    return BUILDERS[choose_strategy(name)](timeouts or ClusterTimeouts())


def choose_strategy(name: StrategyName) -> StrategyName:
    """Returns the strategy that `auto` selects, or else `name`.

    Must run before any other operation of the process.

    Raises:
      ConfigError: If `name` is `auto` and TF_CONFIG is malformed.
    """
    if name != "auto":
        return name
    role = cluster_role()
    if "ps" in role.cluster:
        return "parameter_server"
    if len(role.workers) > 1:
        return "multi_worker_mirrored"
    return "mirrored" if len(tf.config.list_logical_devices("GPU")) > 1 else "one_device"


def _mirrored() -> tf.distribute.Strategy:
    devices = _devices()
    on_one = path_for(devices).reduces_on_one_device
    all_reduce = tf.distribute.ReductionToOneDevice() if on_one else None
    return tf.distribute.MirroredStrategy(devices, all_reduce)


def _tpu(timeout: float) -> tf.distribute.Strategy:
    """Connects to and initializes a TPU. Not yet run on hardware.

    The environment variable TPU_NAME selects the TPU: `local` (the default, the TPU of this
    machine), an address such as grpc://10.0.0.2:8470, or the name of a Cloud TPU, which Google's
    metadata server resolves.

    Args:
      timeout: Seconds for each of connection and greeting. Resolving the name, connecting
        TensorFlow and initializing the TPU have no timeout.
    """
    name = os.environ.get("TPU_NAME") or "local"
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        address = resolver.master().removeprefix("grpc://")  # "" for a local TPU
        if address and ask(address, timeout) != "greets":  # TensorFlow would wait forever
            raise TimeoutError(f"{address} did not answer within {timeout:g} s")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as error:  # several libraries may raise
        raise DeviceError(
            f"TensorFlow found no TPU {name!r} (environment variable TPU_NAME). On a TPU VM, "
            "install libtpu. For a remote TPU, set TPU_NAME to its address, such as "
            f"grpc://10.0.0.2:8470. ({type(error).__name__}: {str(error)[:80]})"
        ) from error


def _devices() -> list[str]:
    """Returns the names of this process's GPUs; of its CPU devices if there are none."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


BUILDERS: dict[StrategyName, Callable[[ClusterTimeouts], tf.distribute.Strategy]] = {
    "one_device": lambda *_: tf.distribute.OneDeviceStrategy(_devices()[0]),
    "mirrored": lambda *_: _mirrored(),
    "central_storage": lambda *_: tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=_devices(), parameter_device="CPU:0"
    ),
    "multi_worker_mirrored": build_multi_worker_strategy,
    "parameter_server": build_parameter_server_strategy,
    "tpu": lambda timeouts: _tpu(min(timeouts.join, 10.0)),
}
