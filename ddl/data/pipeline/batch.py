"""A global batch, as a pipeline passes it to the replicas."""

from typing import Any, NamedTuple

import tensorflow as tf

from ddl.microbatch import is_compiled


class Batch(NamedTuple):
    """A global batch: what `BatchPipeline.examples` and `microbatch` need of it.

    It is a structure of tensors, so `strategy.run` gives each replica its part.

    Attributes:
      rows: Features or "index" by name, and "weight", of all replicas of this process or of one.
      arrays: `BatchPipeline.resident_arrays` that "index" refers to; {} if `rows` holds features.
      counter: `ddl.random.batch_counter` of the batch's number, uint64 [2].
    """

    rows: Any
    arrays: Any
    counter: tf.Tensor


def static_slice(rows: tf.Tensor, first: tf.Tensor, size: int) -> tf.Tensor:
    """Returns `size` rows from number `first` on, in static shape. In a graph.

    Args:
      rows: [n, …].
      first: int32 [].
      size: Number of rows.
    """
    if is_compiled():  # XLA would compile a strided slice anew for each place
        places = tf.stack([first] + [0] * (rows.shape.rank - 1))
        return tf.slice(rows, places, [size, *rows.shape[1:]])
    return tf.ensure_shape(rows[first : first + size], [size, *rows.shape[1:]])
