"""The choices that depend on the kind of the replicas' devices, each made here and nowhere else.

All paths make the same batches, to the bit, and the same sums up to rounding. Tests run the GPU's
path on virtual CPU devices: `with taking(GPU): …`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from ddl.distribution.devices import replica_devices, split_into


@dataclasses.dataclass(frozen=True)
class DevicePath:
    """The path of the batches and of the gradients on one kind of device.

    Attributes:
      has_own_memory: Whether the devices have a memory of their own. The host then counts the
        updates of a loop, and a replica's rows of many updates are copied to its device at once.
        Resident arrays of bytes and of 32-bit integers are then stored as int64: TensorFlow keeps
        int32 in host memory even for operations on a GPU.
      reduces_on_one_device: Whether `mirrored` adds gradients on the first device. The devices then
        share memory, where packing only adds copies. Otherwise TensorFlow takes NCCL or rings.
      sums_on_devices: Whether sums over microbatches stay in variables on each device, and metric
        sums are reduced there, since a GPU would wait for the host.
      subtracts_at_once: Whether one kernel subtracts from rows of a table. On CPUs that kernel is
        slower than three that read the rows, subtract, and write them. With parameter servers it
        must be one, since workers do not wait for each other between a read and a write.
      compiles: Whether `--jit_compile=auto` compiles by XLA: few kernels instead of many, each of
        which costs time to start on a GPU.
      can_compile: Whether a function can be compiled by XLA on its own. TPUs compile whatever runs.
    """

    has_own_memory: bool = False
    reduces_on_one_device: bool = False
    sums_on_devices: bool = False
    subtracts_at_once: bool = False
    compiles: bool = False
    can_compile: bool = True


CPU = DevicePath(reduces_on_one_device=True)
GPU = DevicePath(
    has_own_memory=True,
    sums_on_devices=True,
    subtracts_at_once=True,
    compiles=True,
)
VIRTUAL_GPU = dataclasses.replace(GPU, reduces_on_one_device=True)
"""Logical devices of one GPU, which share its memory. NCCL needs a GPU for each replica."""

TPU = DevicePath(subtracts_at_once=True, can_compile=False)

_taken: list[DevicePath] = []


def path_of(strategy: tf.distribute.Strategy | None = None) -> DevicePath:
    """Returns the path for the devices of this process's replicas, or the one of `taking`.

    Args:
      strategy: The strategy; None takes that of this thread, such as in replica context.
    """
    strategy = strategy or tf.distribute.get_strategy()
    path = path_for(replica_devices(strategy))
    # Private to TensorFlow. The public property cluster_resolver is None with parameter servers.
    if not strategy._should_use_with_coordinator:
        return path
    return dataclasses.replace(path, sums_on_devices=False, subtracts_at_once=True)


def path_for(devices: Sequence[str]) -> DevicePath:
    """Returns the path for devices of these names, or the one of `taking`."""
    if _taken:
        return _taken[-1]
    kinds = {tf.DeviceSpec.from_string(device).device_type for device in devices}
    if "GPU" in kinds:
        return VIRTUAL_GPU if split_into("GPU") > 1 else GPU
    return CPU if kinds <= {"CPU"} else TPU


@contextlib.contextmanager
def taking(path: DevicePath) -> Iterator[None]:
    """Takes this path in all threads, whatever the devices are.

    For tests. Everything that a trainer does must happen in the `with` block.
    """
    _taken.append(path)
    try:
        yield
    finally:
        _taken.pop()


def on_host() -> contextlib.AbstractContextManager:
    """Returns a context that places operations on the host."""
    return tf.device("/device:CPU:0")


def on_host_if_placed(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """Returns a context that places operations on the host where devices have their own memory."""
    return on_host() if path_of(strategy).has_own_memory else contextlib.nullcontext()
