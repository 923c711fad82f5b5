"""The devices that this process sees, and those of a strategy's replicas.

`configure_devices` must run before TensorFlow creates its devices.
"""

import ctypes
from collections.abc import Sequence

import tensorflow as tf

from ddl.devices.replicas import gpu_is_split
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DeviceError

_MIB = 1 << 20

# The rest holds what CUDA and its libraries allocate themselves.
_SHARE_OF_GPU = 0.85


def configure_devices(
    num_virtual_devices: int | None = None,
    gpus: Sequence[int] | None = None,
    memory_growth: bool = True,
    deterministic_ops: bool = False,
    virtual_gpu_memory: int | None = None,
) -> None:
    """Selects the devices that this process sees. Must run before any TensorFlow operation.

    Args:
      num_virtual_devices: Number of logical devices into which the one GPU of `gpus` is split, or
        the host CPU if `gpus` is None or empty; GPUs are then hidden. N virtual devices allow
        development and tests of N replicas without N accelerators. None splits nothing.
      gpus: Indices of the GPUs to use; empty for none, None for all.
      memory_growth: Whether GPU memory is allocated as needed instead of all at once. TensorFlow
        does not offer this for virtual GPUs, which allocate their memory at once.
      deterministic_ops: Whether every operation must be bitwise reproducible on a GPU, at some
        cost. CPU operations are reproducible anyway.
      virtual_gpu_memory: Memory of each virtual GPU in MiB; None divides 85% of the GPU's memory.

    Raises:
      ConfigError: If `num_virtual_devices` is not positive or given with several GPUs, a GPU is
        given twice, or `virtual_gpu_memory` is not positive or given without virtual GPUs.
      DeviceError: If a GPU does not exist, its memory is too small for `virtual_gpu_memory`, or
        TensorFlow has already created devices other than the requested ones.
    """
    _check(num_virtual_devices, gpus, virtual_gpu_memory)
    if deterministic_ops:
        tf.config.experimental.enable_op_determinism()
    if num_virtual_devices is None:
        _choose_gpus(gpus, memory_growth)
    elif gpus:
        _split_gpu(gpus[0], num_virtual_devices, virtual_gpu_memory)
    else:
        _split_host_cpu(num_virtual_devices)


def _check(
    num_virtual_devices: int | None, gpus: Sequence[int] | None, virtual_gpu_memory: int | None
) -> None:
    if num_virtual_devices is not None and num_virtual_devices < 1:
        raise ConfigError(f"num_virtual_devices must be at least 1, got {num_virtual_devices}.")
    twice = sorted({index for index in gpus or () if list(gpus or ()).count(index) > 1})
    if twice:
        raise ConfigError(
            f"gpus (--gpus) must name each GPU once, got {_listed(gpus or ())}. Remove the second "
            f"{_listed(twice)}; to split one GPU, use num_virtual_devices (--num_virtual_devices)."
        )
    if num_virtual_devices is not None and gpus and len(gpus) > 1:
        raise ConfigError(
            "num_virtual_devices splits one GPU, or the host CPU, but gpus (--gpus) names the GPUs "
            f"{_listed(gpus)}. Name one GPU, or remove num_virtual_devices."
        )
    if virtual_gpu_memory is None:
        return
    if virtual_gpu_memory < 1:
        raise ConfigError(f"virtual_gpu_memory must be at least 1 MiB, got {virtual_gpu_memory}.")
    if num_virtual_devices is None or not gpus:
        raise ConfigError(
            "virtual_gpu_memory is the memory of each virtual GPU, but no GPU is split. Set "
            "num_virtual_devices and one of gpus (--num_virtual_devices=2 --gpus=0), or remove it."
        )


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


def _split_gpu(index: int, count: int, memory: int | None) -> None:
    (gpu,) = _gpus([index])
    total = _memory_of_gpu(index)
    if memory is None:
        if total is None:
            raise DeviceError(
                f"The memory of GPU {index} could not be read from CUDA's driver. Set "
                "virtual_gpu_memory, in MiB for each virtual GPU."
            )
        memory = max(1, int(total * _SHARE_OF_GPU) // count)
    if total is not None and count * memory > total:
        raise DeviceError(
            f"{count} virtual GPUs of {memory:,} MiB need {count * memory:,} MiB, but GPU {index} "
            f"has {total:,} MiB. Lower virtual_gpu_memory or num_virtual_devices."
        )
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
    try:
        tf.config.set_visible_devices([gpu], "GPU")
        tf.config.set_logical_device_configuration(gpu, [limit] * count)
    except RuntimeError as error:
        present = len(tf.config.list_logical_devices("GPU"))
        if present != count:
            raise DeviceError(
                f"{count} virtual GPUs are requested, but TensorFlow already started with "
                f"{present}. Request them before the first TensorFlow operation of the process, or "
                "start a new process."
            ) from error


def _memory_of_gpu(index: int) -> int | None:
    """Returns a GPU's memory in MiB; None if CUDA's driver does not say.

    TensorFlow says it only of devices that it has already created.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else memory.value // _MIB


def _gpus(indices: Sequence[int]) -> list[tf.config.PhysicalDevice]:
    present = tf.config.list_physical_devices("GPU")
    absent = [index for index in indices if not 0 <= index < len(present)]
    if absent:
        raise DeviceError(
            f"GPU {_listed(absent)} is requested, but TensorFlow sees {len(present)} on this "
            f"machine (available: {_listed(range(len(present))) or 'none'}). Check the driver with "
            "nvidia-smi, install the extra 'cuda', or remove `gpus` (--gpus)."
        )
    return [present[index] for index in indices]


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _choose_gpus(indices: Sequence[int] | None, memory_growth: bool) -> None:
    chosen = tf.config.list_physical_devices("GPU") if indices is None else _gpus(indices)
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

    GPUs have their numbers on this machine, as in --gpus.

    With parameter servers, describes the cluster: 'workers: 2, parameter servers: 1'.
    """
    if traits_of(strategy).asynchronous:
        workers, servers = strategy._num_workers, strategy._num_ps
        return f"workers: {workers}, parameter servers: {servers}"
    names = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    virtual = len(tf.config.list_logical_devices("CPU")) > 1
    if names[0].device_type == "CPU" and virtual:
        return f"{len(names)} of {len(tf.config.list_logical_devices('CPU'))} virtual CPU devices"
    if names[0].device_type == "GPU":
        seen = sorted(
            int(gpu.name.rpartition(":")[2]) for gpu in tf.config.get_visible_devices("GPU")
        )
        if gpu_is_split():
            present = len(tf.config.list_logical_devices("GPU"))
            return f"{len(names)} of {present} virtual devices of GPU:{seen[0]}"
        return ", ".join(f"GPU:{seen[name.device_index or 0]}" for name in names)
    return ", ".join(f"{name.device_type}:{name.device_index or 0}" for name in names)
