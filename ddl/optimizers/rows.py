"""Sparse gradients: the rows of a table that they name, and their dense form."""

from typing import Any

import tensorflow as tf

from ddl.distribution.path import path_of


def subtract_rows(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    """Subtracts values from rows of a variable. Runs in the strategy's update context.

    The result has the same bits on each path (`DevicePath.subtracts_at_once`).

    Args:
      variable: A variable [all rows, …], or a replica-local copy of it.
      rows: int32 or int64 [rows]; each index at most once.
      values: [rows, …], in the variable's dtype.
    """
    handle = variable.handle
    if path_of().subtracts_at_once:
        tf.raw_ops.ResourceScatterSub(resource=handle, indices=rows, updates=values)
        return
    before = tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=values.dtype)
    tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=rows, updates=before - values)


def dense(gradient: tf.Tensor | tf.IndexedSlices, variable: Any) -> tf.Tensor:
    """Returns a dense gradient of a variable's dtype and static shape; repeated rows are summed.

    The shape of a sparse gradient may be a tensor, as within tf.cond.
    """
    values = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
    known = values.shape.is_fully_defined()
    return values if known else tf.ensure_shape(values, variable.shape)
