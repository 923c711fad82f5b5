"""The devices that this process sees, and those of a strategy's replicas.

`configure_devices` must run before TensorFlow creates its devices.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError, DeviceError

# The rest holds what CUDA and its libraries allocate themselves.
_SHARE_OF_GPU = 0.85


def configure_devices(
    num_virtual_devices: int | None = None,
    gpus: Sequence[int] | None = None,
    deterministic_ops: bool = False,
) -> None:
    """Selects the devices that this process sees. Must run before any TensorFlow operation.

    GPU memory is allocated as needed, except that of virtual GPUs: TensorFlow allocates it at once.

    Args:
      num_virtual_devices: Number of logical devices into which the one GPU of `gpus` is split, each
        with an equal share of 85% of its memory, or the host CPU if `gpus` is None or empty; GPUs
        are then hidden. N virtual devices allow development and tests of N replicas without N
        accelerators. None splits nothing.
      gpus: Indices of the GPUs to use; empty for none, None for all.
      deterministic_ops: Whether every operation must be bitwise reproducible on a GPU, at some
        cost. CPU operations are reproducible anyway.

    Raises:
      ConfigError: If `num_virtual_devices` is not positive or given with several GPUs, a GPU is
        given twice, or its memory cannot be read.
      DeviceError: If a GPU does not exist, or TensorFlow has already created devices other than the
        requested ones.
    """
    given = list(gpus or ())
    if num_virtual_devices is not None and num_virtual_devices < 1:
        raise ConfigError(f"num_virtual_devices must be at least 1, got {num_virtual_devices}.")
    if len(given) > len({*given}) or (len(given) > 1 and num_virtual_devices is not None):
        raise ConfigError(
            "gpus (--gpus) must name each GPU once, and a single one with num_virtual_devices "
            f"(--num_virtual_devices), which splits it; got {_listed(given)}. Remove the others."
        )
    if deterministic_ops:
        tf.config.experimental.enable_op_determinism()
    splits_cpu = num_virtual_devices is not None and not given
    seen = _gpus([] if splits_cpu else gpus)
    try:
        tf.config.set_visible_devices(seen, "GPU")
        if num_virtual_devices is None:
            for gpu in seen:
                tf.config.experimental.set_memory_growth(gpu, True)
        else:
            device = tf.config.list_physical_devices("CPU")[0] if splits_cpu else seen[0]
            memory = None if splits_cpu else _memory_to_split(given[0]) // num_virtual_devices
            part = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
            tf.config.set_logical_device_configuration(device, [part] * num_virtual_devices)
    except RuntimeError as error:
        # TensorFlow raises on any change once its devices exist. If they are the requested ones (a
        # second run in one process), this is not an error.
        present = len(tf.config.list_logical_devices("CPU" if splits_cpu else "GPU"))
        wanted = num_virtual_devices or len(seen)
        if present != wanted or tf.config.get_visible_devices("GPU") != seen:
            raise DeviceError(
                f"{wanted} {'GPUs' if num_virtual_devices is None else 'virtual devices'} are "
                f"requested, but TensorFlow already has {present}, or others. Request them "
                "before the first TensorFlow operation of the process, or start a new process."
            ) from error


def _gpus(indices: Sequence[int] | None) -> list[tf.config.PhysicalDevice]:
    present = tf.config.list_physical_devices("GPU")
    indices = range(len(present)) if indices is None else indices
    absent = [index for index in indices if not 0 <= index < len(present)]
    if absent:
        raise DeviceError(
            f"GPU {_listed(absent)} is requested, but TensorFlow sees {len(present)} on this "
            f"machine (available: {_listed(range(len(present))) or 'none'}). Check the driver with "
            "nvidia-smi, install the extra 'cuda', or remove `gpus` (--gpus)."
        )
    return [present[index] for index in indices]


def _memory_to_split(index: int) -> int:
    """Returns the MiB of a GPU that virtual ones share, by CUDA: TensorFlow has yet to open it."""
    driver, device, memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
    if failed or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device):
        raise ConfigError(  # a RuntimeError would be taken for TensorFlow's
            f"The memory of GPU {index} could not be read from CUDA's driver, so it cannot be "
            "split. Check the driver with nvidia-smi, or split the CPU (--gpus=none)."
        )
    return int(memory.value * _SHARE_OF_GPU) >> 20


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def split_into(kind: str) -> int:
    """Returns the number of logical devices into which this process splits a device of a kind.

    It does not start TensorFlow, as listing the logical devices would.
    """
    seen = tf.config.get_visible_devices(kind)
    parts = [tf.config.get_logical_device_configuration(device) or [None] for device in seen]
    return max(map(len, parts), default=1)


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas.

    Empty for the default strategy.
    """
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:
        return ()


def replica_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas.

    For the default strategy, returns the device that TensorFlow uses by default.
    """
    # Under the default strategy TensorFlow places operations on the first GPU, if there is one.
    default = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return local_devices(strategy) or (default,)


def is_on_server(variable: Any) -> bool:
    """Returns whether a parameter server holds a variable."""
    device = getattr(variable, "device", None)
    return isinstance(device, str) and "/job:ps/" in device
