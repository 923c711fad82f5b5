"""The batches of an update, as a pipeline passes them to the replicas."""

from typing import Any, NamedTuple

import tensorflow as tf

from ddl.distribution.path import path_of
from ddl.microbatch import is_compiled


class Batch(NamedTuple):
    """The batches of an update, as `strategy.run` passes each replica its part.

    Attributes:
      rows: Features or "index", and "weight" unless all are 1: [rows, …] of the update; or of many
        updates, [updates, rows], if there is a `place`.
      arrays: Arrays on the replica's device that "index" refers to; {} if `rows` holds features.
      counter: `ddl.random.batch_counter` of the update's number, uint64 [2].
      place: Place of the update in `rows`, int32 or int64 []; () if `rows` holds one update.
    """

    rows: Any
    arrays: Any
    counter: tf.Tensor
    place: Any = ()


def row_of(batch: Batch) -> dict[str, tf.Tensor]:
    """Returns an update's row of a table."""
    on_host = batch.place.dtype == tf.int32 or not path_of().places_order
    if on_host and not is_compiled():  # the rows are a view
        return {name: rows[batch.place] for name, rows in batch.rows.items()}
    # A slice would read the place on the host, and so make the host wait for a GPU.
    return {name: tf.gather(rows, batch.place) for name, rows in batch.rows.items()}


def static_slice(rows: tf.Tensor, first: tf.Tensor | int, size: int) -> tf.Tensor:
    """Returns `size` rows from number `first` on, in static shape. In a graph."""
    if is_compiled():  # XLA would compile a strided slice anew for each place
        places = tf.stack([first] + [0] * (rows.shape.rank - 1))
        return tf.slice(rows, places, [size, *rows.shape[1:]])
    return tf.ensure_shape(rows[first : first + size], [size, *rows.shape[1:]])
