"""Gradient communication between replicas: buffers and collectives."""

import itertools
import weakref

import tensorflow as tf

from ddl.distribution.devices import split_into

# Size of a buffer of gradients, the last layers' first: large enough that latency does not dominate
# a transfer, and small enough that a model with 100 MB of gradients sends most of them while the
# backward pass computes the others.
_BYTES_PER_PACK = 32 << 20

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


def reduce_options() -> tf.distribute.experimental.CommunicationOptions:
    """Returns how replicas sum gradients, as TensorFlow's hints for `extended.batch_reduce_to`.

    Collectives run over NCCL between GPUs, else over rings: on CPU devices and on virtual GPUs.
    """
    implementation = tf.distribute.experimental.CommunicationImplementation
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=_BYTES_PER_PACK,
        # TensorFlow would take NCCL, which needs a GPU for each replica.
        implementation=implementation.RING if split_into("GPU") > 1 else implementation.AUTO,
    )
