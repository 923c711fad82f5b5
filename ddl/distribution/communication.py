"""Gradient communication between replicas: collectives, buffers and all-reduce algorithms."""

import dataclasses

import tensorflow as tf

from ddl.choices import (
    BYTES_PER_PACK,
    COLLECTIVES,
    CROSS_DEVICE_OPS,
    Collectives,
    CrossDeviceOps,
)
from ddl.devices.path import AutomaticAllReduce, DevicePath
from ddl.devices.replicas import gpu_is_split
from ddl.errors import ConfigError, check_choice


@dataclasses.dataclass(frozen=True)
class Communication:
    """Options for the communication of gradients between replicas.

    Attributes:
      cross_device_ops: The all-reduce of `mirrored`. `auto` takes TensorFlow's collectives over
        NCCL on GPUs, and reduction to one device on CPU devices and on virtual GPUs.
      num_packs: For `nccl` and `hierarchical_copy`: number of buffers into which gradients are
        packed before the all-reduce; 0 sends each gradient separately.
      bytes_per_pack: For collectives: size in bytes at which a buffer is sent, the last layers'
        first; 0 makes one buffer.
      collectives: Implementation of collectives; `auto` takes NCCL between GPUs, else rings: on
        CPU devices and on virtual GPUs.
      timeout_seconds: For collectives: seconds after which a collective that a peer has not joined
        raises an error; None waits forever.

    Raises:
      ConfigError: If a choice is unknown or a number is out of range.
    """

    cross_device_ops: CrossDeviceOps = "auto"
    num_packs: int = 1
    bytes_per_pack: int = BYTES_PER_PACK
    collectives: Collectives = "auto"
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        check_choice("Communication.cross_device_ops", self.cross_device_ops, CROSS_DEVICE_OPS)
        check_choice("Communication.collectives", self.collectives, COLLECTIVES)
        if self.num_packs < 0 or self.bytes_per_pack < 0:
            raise ConfigError(
                "Communication.num_packs and bytes_per_pack must be at least 0, got "
                f"{self.num_packs} and {self.bytes_per_pack}. num_packs=0 sends each gradient on "
                "its own, bytes_per_pack=0 all of them in one buffer."
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ConfigError(
                "Communication.timeout_seconds must be greater than 0, "
                f"got {self.timeout_seconds}. Leave it out to wait forever."
            )

    def options(self) -> tf.distribute.experimental.CommunicationOptions:
        """Returns the options as TensorFlow's hints for `extended.batch_reduce_to`.

        Raises:
          ConfigError: If `collectives` is `nccl`, and there is no GPU or the GPUs are virtual.
        """
        gpus = tf.config.list_physical_devices("GPU")
        if self.collectives == "nccl" and not gpus:
            raise ConfigError(
                "Communication.collectives = 'nccl' needs a GPU for each replica, "
                "but TensorFlow sees no GPU. Set it to 'auto'."
            )
        collectives = self.collectives
        if gpus and gpu_is_split():
            if collectives == "nccl":
                raise ConfigError(
                    "Communication.collectives = 'nccl' needs a GPU for each "
                    "replica, but the GPUs are virtual. Set it to 'auto'."
                )
            collectives = "ring"  # TensorFlow would take NCCL
        experimental = tf.distribute.experimental
        return experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            implementation=experimental.CommunicationImplementation(collectives.upper()),
        )


def cross_device_ops(
    communication: Communication, path: DevicePath
) -> tf.distribute.CrossDeviceOps | None:
    """Returns the all-reduce of `mirrored`; None leaves the choice to TensorFlow.

    Args:
      communication: The options.
      path: The path for the replicas' devices, which decides what `auto` means.

    Raises:
      ConfigError: If `cross_device_ops` is `nccl` and the replicas are not on GPUs of their own.
    """
    choice: AutomaticAllReduce | CrossDeviceOps = communication.cross_device_ops
    if choice == "auto":
        choice = path.all_reduce
    if choice == "collectives":
        return None  # TensorFlow's own choice: over NCCL on GPUs, else over rings
    if choice == "nccl":
        if not path.has_nccl:
            raise ConfigError(
                "Communication.cross_device_ops = 'nccl' needs a GPU for each "
                "replica, but the replicas are not on GPUs of their own. Set it to 'auto'."
            )
        return tf.distribute.NcclAllReduce(num_packs=communication.num_packs)
    if choice == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs=communication.num_packs)
    return tf.distribute.ReductionToOneDevice()
