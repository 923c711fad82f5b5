"""Tensors in shares, one for each replica. Replica context.

A tensor of n entries has shares of ⌈n / replicas⌉ entries. The last ones are padded with zeros, so
that all have one shape.
"""

from collections.abc import Sequence

import tensorflow as tf

from ddl.layers.across_replicas import gather_over_replicas, scatter_over_replicas


def size_of_share(shape: tf.TensorShape, replicas: int) -> int:
    """Returns the number of entries of a share of a tensor."""
    return -(-int(shape.num_elements()) // replicas)


def share_of(value: tf.Tensor, replica: int, replicas: int) -> tf.Tensor:
    """Returns a replica's share of a tensor: [entries of a share]. In any context.

    It may use the memory of the tensor. A variable that keeps it takes `copied_share`.
    """
    size = size_of_share(value.shape, replicas)
    return _padded(tf.reshape(value, [-1])[replica * size : (replica + 1) * size], size)


def copied_share(value: tf.Tensor, replica: int, replicas: int) -> tf.Tensor:
    """Returns `share_of` in memory of its own.

    TensorFlow does not copy a slice of rows, nor a value that is assigned to a variable: a variable
    to which such a slice is assigned keeps the whole tensor in memory. It copies slices of columns.
    """
    size = size_of_share(value.shape, replicas)
    row = tf.reshape(value, [1, -1])[:, replica * size : (replica + 1) * size]
    return _padded(tf.reshape(row, [-1]), size)


def own_share(value: tf.Tensor) -> tf.Tensor:
    """Returns this replica's share of a tensor that all replicas hold."""
    context = tf.distribute.get_replica_context()
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    return share_of(value, int(replica), context.num_replicas_in_sync)


def summed_to_shares(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    """Sums tensors over the replicas; returns this replica's share of each sum.

    Args:
      gradients: This replica's gradients. Sparse ones become dense.
    """
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    rows = [_rows(gradient, replicas) for gradient in dense]
    # The backward pass computes the last layers' gradients first, so they are sent first.
    sums = scatter_over_replicas(rows[::-1])[::-1]
    return [tf.reshape(own, [-1]) for own in sums]


def gathered(shares: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Returns whole tensors from the shares of all replicas.

    Args:
      shares: This replica's shares.
      shapes: The shapes of the whole tensors.
    """
    rows = gather_over_replicas([share[tf.newaxis] for share in shares])
    return [
        tf.reshape(tf.reshape(row, [-1])[: shape.num_elements()], shape)
        for row, shape in zip(rows, shapes, strict=True)
    ]


def _padded(part: tf.Tensor, size: int) -> tf.Tensor:
    missing = size - part.shape[0]
    return tf.pad(part, [[0, missing]]) if missing else part


def _rows(value: tf.Tensor, replicas: int) -> tf.Tensor:
    """Returns the shares of all replicas: [replicas, entries of a share]."""
    size = size_of_share(value.shape, replicas)
    return tf.reshape(_padded(tf.reshape(value, [-1]), replicas * size), [replicas, size])
