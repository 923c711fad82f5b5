"""The order of many batches, computed on the host and copied to the devices at once."""

import contextlib
from typing import Any

import tensorflow as tf

from ddl.devices.path import path_of


def on_host_if_placed(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """Returns a context in which the order is computed, before `placed`."""
    return on_host() if path_of(strategy).places_order else contextlib.nullcontext()


def on_host() -> contextlib.AbstractContextManager:
    """Returns a context that places operations on the host."""
    return tf.device("/device:CPU:0")


def placed(
    ordered: dict[str, tf.Tensor], rows_of_replica: int, strategy: tf.distribute.Strategy
) -> dict[str, Any]:
    """Copies each replica's part of `BatchPipeline.batches_from` to its device. Cross-replica.

    Args:
      ordered: Indices and weights of k batches, [k, rows of all replicas of this process].
      rows_of_replica: Rows that a replica computes of each batch, in all microbatches.
      strategy: Strategy of the training.

    Returns:
      Per-replica values of the same names, [k, rows_of_replica]; `ordered` itself where the devices
      share the memory of the host.
    """
    if not path_of(strategy).places_order:
        return ordered

    def own(made: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        first = first_own_row(next(iter(made.values())).shape[1], rows_of_replica)
        with on_host():
            columns = slice(first, first + rows_of_replica)
            parts = {name: rows[:, columns] for name, rows in made.items()}
        shape = [None, rows_of_replica]
        return {name: tf.identity(tf.ensure_shape(rows, shape)) for name, rows in parts.items()}

    return strategy.run(own, (ordered,))


def rows_at(
    ordered: dict[str, Any], place: tf.Tensor, strategy: tf.distribute.Strategy
) -> dict[str, Any]:
    """Returns the indices and weights of one batch, as `Batch.rows`. Cross-replica, in a graph.

    Args:
      ordered: The result of `placed`.
      place: Number of the batch, counted from the first one of `ordered`: [], int32 if the host
        counts the batches, else int64.
      strategy: Strategy of the training.
    """
    if not path_of(strategy).places_order:
        return {name: rows[place] for name, rows in ordered.items()}
    return strategy.run(_taken, (ordered, place))


def _taken(ordered: dict[str, tf.Tensor], place: tf.Tensor) -> dict[str, tf.Tensor]:
    if place.dtype == tf.int32:  # on the host: the rows are a view
        return {name: rows[place] for name, rows in ordered.items()}
    # A slice would read `place` on the host, and so make the host wait for the device.
    return {name: tf.gather(rows, place) for name, rows in ordered.items()}


def first_own_row(held: int, of_replica: int) -> tf.Tensor:
    """Returns the first of this replica's rows among the `held` ones of its process: int32 []."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.cast(replica, tf.int32) % (held // of_replica) * of_replica
