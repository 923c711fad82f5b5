"""Gradient communication between replicas: buffers, timeout and collectives."""

import dataclasses

import tensorflow as tf

from ddl.distribution.devices import split_into


@dataclasses.dataclass(frozen=True)
class Communication:
    """Options for the communication of gradients between replicas.

    Collectives run over NCCL between GPUs, else over rings: on CPU devices and on virtual GPUs.

    Attributes:
      bytes_per_pack: Size in bytes at which a buffer of gradients is sent, the last layers' first;
        0 makes one buffer. The default is large enough that latency does not dominate a transfer,
        and small enough that a model with 100 MB of gradients sends most of them while the backward
        pass computes the others.
      timeout_seconds: Seconds after which a collective that a peer has not joined raises an error;
        None waits forever.
    """

    bytes_per_pack: int = 32 << 20
    timeout_seconds: float | None = None

    def options(self) -> tf.distribute.experimental.CommunicationOptions:
        """Returns the options as TensorFlow's hints for `extended.batch_reduce_to`.

        Raises:
          ValueError: If `bytes_per_pack` is negative.
        """
        implementation = tf.distribute.experimental.CommunicationImplementation
        return tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            # TensorFlow would take NCCL, which needs a GPU for each replica.
            implementation=implementation.RING if split_into("GPU") > 1 else implementation.AUTO,
        )
