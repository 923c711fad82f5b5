"""Gradient communication between replicas: buffers and collectives."""

import dataclasses
import itertools
import weakref

import tensorflow as tf

from ddl.distribution.devices import split_into

_KEYS = itertools.count(10_000, 10_000)
_NUMBERED: "weakref.WeakSet[tf.distribute.Strategy]" = weakref.WeakSet()


def number_collectives(strategy: tf.distribute.Strategy) -> None:
    """Gives the collectives of a MirroredStrategy keys that no other strategy of the process has.

    TensorFlow numbers them from 1 in each strategy. A second one would meet the collectives of the
    first, which have other shapes, in its first update.

    Args:
      strategy: Any strategy; only a MirroredStrategy that has not been here is changed.
    """
    if type(strategy) is not tf.distribute.MirroredStrategy or strategy in _NUMBERED:
        return
    _NUMBERED.add(strategy)
    extended = strategy.extended
    extended._collective_key_base = next(_KEYS)
    was = extended._collective_ops
    extended._collective_ops = extended._make_collective_ops_with_fallbacks()
    if extended._cross_device_ops is was:
        extended._cross_device_ops = extended._collective_ops


@dataclasses.dataclass(frozen=True)
class Communication:
    """Options for the communication of gradients between replicas.

    Collectives run over NCCL between GPUs, else over rings: on CPU devices and on virtual GPUs.

    Attributes:
      bytes_per_pack: Size in bytes at which a buffer of gradients is sent, the last layers' first;
        0 makes one buffer. The default is large enough that latency does not dominate a transfer,
        and small enough that a model with 100 MB of gradients sends most of them while the backward
        pass computes the others.
    """

    bytes_per_pack: int = 32 << 20

    def options(self) -> tf.distribute.experimental.CommunicationOptions:
        """Returns the options as TensorFlow's hints for `extended.batch_reduce_to`.

        Raises:
          ValueError: If `bytes_per_pack` is negative.
        """
        implementation = tf.distribute.experimental.CommunicationImplementation
        return tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack,
            # TensorFlow would take NCCL, which needs a GPU for each replica.
            implementation=implementation.RING if split_into("GPU") > 1 else implementation.AUTO,
        )
