"""Where a run takes place: devices, and the `tf.distribute` strategy over them.

Nothing here changes what is computed.
`configure_devices` must run before TensorFlow has created its devices, `build_strategy` before the
model is built.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from ddl.choices import (
    BYTES_PER_PACK,
    COLLECTIVES,
    CROSS_DEVICE_OPS,
    STRATEGIES,
    Collectives,
    CrossDeviceOps,
    StrategyName,
)
from ddl.cluster_place import cluster_place
from ddl.cluster_timeouts import ClusterTimeouts
from ddl.errors import ConfigError, DeviceError, check_choice
from ddl.parameter_servers import build_parameter_server_strategy, has_parameter_servers
from ddl.tpu import build_tpu_strategy
from ddl.workers import build_multi_worker_strategy

_TPU_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True)
class Communication:
    """How gradients travel between the replicas.

    Attributes:
      cross_device_ops: The all-reduce of `mirrored`. `auto` takes TensorFlow's collectives for
        GPUs, which use NCCL; on CPU devices it adds up on one of them.
      num_packs: For `nccl` and `hierarchical_copy`: into how many buffers gradients are packed
        before the all-reduce; 0 sends each one by itself.
      bytes_per_pack: For collectives: bytes after which a buffer is full and travels, the last
        layers' first; 0 makes one buffer.
      collectives: How they are carried out; `auto` takes NCCL between GPUs, else rings.
      timeout_seconds: For collectives: after how long one that a peer does not join is an
        error; None waits for ever.
    """

    cross_device_ops: CrossDeviceOps = "auto"
    num_packs: int = 1
    bytes_per_pack: int = BYTES_PER_PACK
    collectives: Collectives = "auto"
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        check_choice("cross_device_ops", self.cross_device_ops, CROSS_DEVICE_OPS)
        check_choice("collectives", self.collectives, COLLECTIVES)
        if self.num_packs < 0 or self.bytes_per_pack < 0:
            raise ConfigError("num_packs and bytes_per_pack are zero or more")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ConfigError("timeout_seconds is more than zero, or None to wait for ever")

    def options(self) -> tf.distribute.experimental.CommunicationOptions:
        """The same as TensorFlow's hint object, for `extended.batch_reduce_to`."""
        if self.collectives == "nccl" and not tf.config.list_physical_devices("GPU"):
            raise ConfigError(
                "collectives is 'nccl', but there is no GPU here. Leave it at 'auto'."
            )
        experimental = tf.distribute.experimental
        return experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            implementation=experimental.CommunicationImplementation(self.collectives.upper()),
        )


def configure_devices(
    num_virtual_devices: int | None = None,
    gpus: Sequence[int] | None = None,
    memory_growth: bool = True,
    deterministic_ops: bool = False,
) -> None:
    """Chooses the devices that this process sees. Call it before any TensorFlow operation.

    Args:
      num_virtual_devices: Splits the host CPU into this many logical devices and hides the
        GPUs: the way to develop and test N replicas without N accelerators. None leaves the
        CPU whole.
      gpus: Which GPUs to use, by index; empty for none, None for all.
      memory_growth: Whether GPU memory is taken as needed rather than all at once.
      deterministic_ops: Whether every operation must repeat bit for bit on a GPU, at some
        cost. On CPU operations repeat anyway.

    Raises:
      ConfigError: If an argument is out of range, or both arguments are given.
      DeviceError: If a GPU is not there, or TensorFlow has created its devices already and
        they are not the ones asked for.
    """
    if num_virtual_devices is not None and num_virtual_devices < 1:
        raise ConfigError(f"num_virtual_devices is {num_virtual_devices}; it is 1 or more")
    if num_virtual_devices is not None and gpus:
        raise ConfigError(
            "num_virtual_devices and gpus exclude each other: virtual devices are made of the "
            "host CPU. Give one of them."
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
        # TensorFlow refuses any change once its devices exist; that the wanted number is
        # there already (a second run in one process) is no reason to fail.
        present = len(tf.config.list_logical_devices("CPU"))
        if present != count:
            raise DeviceError(
                f"{count} virtual devices were asked for, but TensorFlow has already started "
                f"with {present}. Ask for them before the first TensorFlow operation of the "
                "process, or start a new process."
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
                f"GPU {', '.join(map(str, absent))} was asked for, but TensorFlow sees "
                f"{len(present)} on this machine (available: {available}). Check the driver "
                "with nvidia-smi, install the extra 'cuda', or leave the choice out."
            )
        chosen = [present[index] for index in indices]
    try:
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.experimental.set_memory_growth(gpu, memory_growth)
    except RuntimeError as error:
        if len(tf.config.list_logical_devices("GPU")) != len(chosen):
            raise DeviceError(
                "GPUs cannot be chosen any more: TensorFlow has already started. Choose them "
                "before the first TensorFlow operation of the process."
            ) from error


def build_strategy(
    name: StrategyName = "auto",
    communication: Communication | None = None,
    timeouts: ClusterTimeouts | None = None,
) -> tf.distribute.Strategy:
    """Builds the strategy called `name` over all devices that this process sees.

    `auto` takes parameter servers named in TF_CONFIG for `parameter_server`, several workers there
    for `multi_worker_mirrored`, several GPUs for `mirrored`, anything else for `one_device`. With
    `parameter_server` all but the chief call `ddl.parameter_servers.serve` instead.

    Raises:
      ConfigError: If the name is unknown, or TF_CONFIG does not fit.
      DeviceError: If there is no TPU for `tpu`.
      WorkerLost: If another process does not join in time.
    """
    check_choice("strategy", name, STRATEGIES)
    communication, timeouts = communication or Communication(), timeouts or ClusterTimeouts()
    name = choose_strategy(name)
    if name == "multi_worker_mirrored":
        if len(cluster_place().workers) < 2:
            raise ConfigError(
                "multi_worker_mirrored needs an environment variable TF_CONFIG that names two "
                "workers or more. `python -m ddl.launch --num_workers=2 -- …` sets it; one process "
                "alone takes --strategy=mirrored."
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
    """The strategy that `auto` means here, or else `name`. Before any operation of the process."""
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


def cross_device_ops(
    communication: Communication, on_gpu: bool
) -> tf.distribute.CrossDeviceOps | None:
    """What `mirrored` adds gradients up with; None leaves the choice to TensorFlow.

    For CPU devices `auto` is what `python -m benchmarks.cross_device` found fastest.

    Raises:
      ConfigError: If NCCL is asked for without GPUs.
    """
    choice = communication.cross_device_ops
    if choice == "auto":
        if on_gpu:
            return None  # TensorFlow's own choice: collectives over NCCL
        choice = "reduction_to_one_device"
    if choice == "nccl":
        if not on_gpu:
            raise ConfigError(
                "cross_device_ops is 'nccl', but there is no GPU here. Leave it at 'auto'."
            )
        return tf.distribute.NcclAllReduce(num_packs=communication.num_packs)
    if choice == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs=communication.num_packs)
    return tf.distribute.ReductionToOneDevice()


def describe_devices(strategy: tf.distribute.Strategy) -> str:
    """The replicas' devices: '2 of 4 virtual CPU devices', 'GPU:0, GPU:1'."""
    if has_parameter_servers(strategy):
        workers, servers = strategy._num_workers, strategy._num_ps
        return f"workers: {workers}, parameter servers: {servers}"
    names = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    virtual = len(tf.config.list_logical_devices("CPU")) > 1
    if names[0].device_type == "CPU" and virtual:
        return f"{len(names)} of {len(tf.config.list_logical_devices('CPU'))} virtual CPU devices"
    return ", ".join(f"{name.device_type}:{name.device_index or 0}" for name in names)
