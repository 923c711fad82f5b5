"""Batches made on the host: the order of many, copied to the devices at once, and their rows."""

import contextlib
from typing import Any

import tensorflow as tf

from ddl.data.order import batches_at_once
from ddl.data.pipeline.batch import static_slice
from ddl.devices.path import path_of


def on_host_if_placed(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """Returns a context in which the order is computed, before `placed`."""
    return on_host() if path_of(strategy).places_order else contextlib.nullcontext()


def on_host() -> contextlib.AbstractContextManager:
    """Returns a context that places operations on the host."""
    return tf.device("/device:CPU:0")


# Between the loops over the batches that were ordered at once, the host waits for the devices.
_AT_LEAST = 16


def at_least(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of batches to order at once, however many rows they have."""
    return _AT_LEAST if path_of(strategy).places_order else 1


def placed(
    ordered: dict[str, tf.Tensor],
    num_examples: int,
    global_batch_size: int,
    strategy: tf.distribute.Strategy,
) -> dict[str, Any]:
    """Copies each replica's part of `BatchPipeline.batches_from` to its device. Cross-replica.

    Args:
      ordered: Indices and weights of k batches, [k, rows of all replicas of this process].
      num_examples: Examples of an epoch.
      global_batch_size: Rows of each batch, in all microbatches.
      strategy: Strategy of the training.

    Returns:
      Per-replica values of the same names, [most, rows_of_replica], for the largest k, which XLA
      compiles for: only the first k batches are used. `ordered` itself where the devices share the
      memory of the host.
    """
    if not path_of(strategy).places_order:
        return ordered
    rows_of_replica = global_batch_size // strategy.num_replicas_in_sync
    most = batches_at_once(num_examples, global_batch_size, at_least(strategy))

    def own(made: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        first = first_own_row(next(iter(made.values())).shape[1], rows_of_replica)
        with on_host():
            columns = slice(first, first + rows_of_replica)
            parts = {name: rows[:, columns] for name, rows in made.items()}
            parts = {
                name: tf.pad(rows, [[0, most - tf.shape(rows)[0]], [0, 0]])
                for name, rows in parts.items()
            }
        shape = [most, rows_of_replica]
        return {name: tf.identity(tf.ensure_shape(rows, shape)) for name, rows in parts.items()}

    return strategy.run(own, (ordered,))


def kept_on_host(ordered: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns what `from_host` turns back, as loop variables that TensorFlow keeps on the host.

    It would send others to the device of the loop and back. int32 always stays on the host.

    Args:
      ordered: Indices and weights by name, int64 and float32.
    """
    with on_host():
        return {name: tf.bitcast(rows, tf.int32) for name, rows in ordered.items()}


def from_host(kept: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the indices and weights from which `kept_on_host` made these."""
    with on_host():
        return {
            name: tf.bitcast(words, tf.float32 if words.shape.rank == 2 else tf.int64)
            for name, words in kept.items()
        }


def on_own_device(rows: Any, all_rows: int, strategy: tf.distribute.Strategy) -> Any:
    """Returns an element of an iterator with a replica's own rows on its device. Cross-replica.

    Each replica would else copy the rows of all replicas of this process. And a loop over the
    microbatches has no other way to know the device: it would send all rows to the first one, and
    from there, in each turn, to the others.

    Args:
      rows: Features by name: per-replica values, or all rows of this process.
      all_rows: Rows of all replicas in an update, of all workers.
      strategy: Strategy of the training.

    Returns:
      `rows` itself where the devices share the memory of the host.
    """
    if not path_of(strategy).places_order:
        return rows
    rows_of_replica = all_rows // strategy.num_replicas_in_sync

    def own(rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        held = next(iter(rows.values())).shape[0]
        if held != rows_of_replica:
            with on_host():
                first = first_own_row(held, rows_of_replica)
                rows = {n: static_slice(each, first, rows_of_replica) for n, each in rows.items()}
        return {name: tf.identity(each) for name, each in rows.items()}

    return strategy.run(own, (rows,))


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
