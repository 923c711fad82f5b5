"""The upper part of the tree of additions: over the replicas of all workers."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

from ddl.distribution.workers import Workers
from ddl.layers.replica_gather import gather_over_replicas
from ddl.layers.shards.tree import exchanged, sum_in_tree, sum_rows_in_tree


def sum_over_replicas(strategy: tf.distribute.Strategy, each: Sequence[Any]) -> list[Any]:
    """Returns the sums over all replicas, present on every replica. Cross-replica context.

    Args:
      strategy: The strategy; its number of replicas is a power of two.
      each: Values of each replica, of static shapes.
    """
    if strategy.num_replicas_in_sync == 1:
        return list(strategy.run(lambda own: [exchanged(v) for v in own], args=(list(each),)))
    if Workers(strategy).number > 1:
        return list(strategy.run(_sums_of_gathered, args=(list(each),)))
    devices = strategy.extended.worker_devices
    return [_on_all(devices, strategy.experimental_local_results(one)) for one in each]


def _sums_of_gathered(own: list[tf.Tensor]) -> list[tf.Tensor]:
    """Gathers the values of all replicas and adds them on each. Replica context."""
    rows = gather_over_replicas([value[tf.newaxis] for value in own])
    return [exchanged(sum_rows_in_tree(row)) for row in rows]


def _on_all(devices: Sequence[str], parts: Sequence[tf.Tensor]) -> Any:
    """Adds the values of the replicas of this process, neighbours on the device of the first."""
    of_devices = list(zip(devices, parts, strict=True))
    while len(of_devices) > 1:
        pairs = zip(of_devices[::2], of_devices[1::2], strict=True)
        of_devices = [(device, _added(device, a, b)) for (device, a), (_, b) in pairs]
    ((_, total),) = of_devices
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(exchanged(total))
    return distribute_utils.regroup(copies, wrap_class=values.Mirrored)


def _added(device: str, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    with tf.device(device):
        return sum_in_tree([a, b])
