"""The devices that this process sees, and those of a strategy's replicas.

`configure_devices` must run before TensorFlow creates its devices.
"""

from collections.abc import Sequence

import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DeviceError


def configure_devices(
    num_virtual_devices: int | None = None,
    gpus: Sequence[int] | None = None,
    memory_growth: bool = True,
    deterministic_ops: bool = False,
) -> None:
    """Selects the devices that this process sees. Must run before any TensorFlow operation.

    Args:
      num_virtual_devices: Number of logical devices into which the host CPU is split; GPUs are then
        hidden. N virtual devices allow development and tests of N replicas without N accelerators.
        None does not split the CPU.
      gpus: Indices of the GPUs to use; empty for none, None for all.
      memory_growth: Whether GPU memory is allocated as needed instead of all at once.
      deterministic_ops: Whether every operation must be bitwise reproducible on a GPU, at some
        cost. CPU operations are reproducible anyway.

    Raises:
      ConfigError: If `num_virtual_devices` is not positive, or both it and `gpus` are given.
      DeviceError: If a GPU does not exist, or TensorFlow has already created devices other than the
        requested ones.
    """
    if num_virtual_devices is not None and num_virtual_devices < 1:
        raise ConfigError(f"num_virtual_devices must be at least 1, got {num_virtual_devices}.")
    if num_virtual_devices is not None and gpus:
        raise ConfigError(
            "num_virtual_devices and gpus exclude each other, because virtual devices split the "
            "host CPU. Set only one of them."
        )
    if deterministic_ops:
        tf.config.experimental.enable_op_determinism()
    if num_virtual_devices is not None:
        _split_host_cpu(num_virtual_devices)
    else:
        _choose_gpus(gpus, memory_growth)


def _split_host_cpu(count: int) -> None:
    try:
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    except RuntimeError as error:
        # TensorFlow raises on any change once its devices exist. If the requested number exists
        # already (a second run in one process), this is not an error.
        present = len(tf.config.list_logical_devices("CPU"))
        if present != count:
            raise DeviceError(
                f"{count} virtual devices are requested, but TensorFlow already started with "
                f"{present}. Request them before the first TensorFlow operation of the process, or "
                "start a new process."
            ) from error


def _choose_gpus(indices: Sequence[int] | None, memory_growth: bool) -> None:
    present = tf.config.list_physical_devices("GPU")
    if indices is None:
        chosen = present
    else:
        absent = [index for index in indices if not 0 <= index < len(present)]
        if absent:
            available = ", ".join(str(i) for i in range(len(present))) or "none"
            raise DeviceError(
                f"GPU {', '.join(map(str, absent))} is requested, but TensorFlow sees "
                f"{len(present)} on this machine (available: {available}). Check the driver with "
                "nvidia-smi, install the extra 'cuda', or remove `gpus` (--gpus)."
            )
        chosen = [present[index] for index in indices]
    try:
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.experimental.set_memory_growth(gpu, memory_growth)
    except RuntimeError as error:
        if len(tf.config.list_logical_devices("GPU")) != len(chosen):
            raise DeviceError(
                "GPUs can no longer be selected, because TensorFlow already started. Select them "
                "before the first TensorFlow operation of the process."
            ) from error


def describe_devices(strategy: tf.distribute.Strategy) -> str:
    """Describes the replicas' devices: '2 of 4 virtual CPU devices', 'GPU:0, GPU:1'.

    With parameter servers, describes the cluster: 'workers: 2, parameter servers: 1'.
    """
    if traits_of(strategy).asynchronous:
        workers, servers = strategy._num_workers, strategy._num_ps
        return f"workers: {workers}, parameter servers: {servers}"
    names = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    virtual = len(tf.config.list_logical_devices("CPU")) > 1
    if names[0].device_type == "CPU" and virtual:
        return f"{len(names)} of {len(tf.config.list_logical_devices('CPU'))} virtual CPU devices"
    return ", ".join(f"{name.device_type}:{name.device_index or 0}" for name in names)


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas.

    Empty for the default strategy.
    """
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:
        return ()


def gpu_is_split() -> bool:
    """Returns whether this process sees several logical devices on one GPU."""
    seen = tf.config.get_visible_devices("GPU")
    return len(tf.config.list_logical_devices("GPU")) > len(seen)


def replica_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas.

    For the default strategy, returns the device that TensorFlow uses by default.
    """
    # Under the default strategy TensorFlow places operations on the first GPU, if there is one.
    default = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return local_devices(strategy) or (default,)
