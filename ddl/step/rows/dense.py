"""Sparse gradients made dense, so that XLA can compile what reads them."""

from collections.abc import Container, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.microbatch import is_compiled
from ddl.step.gradients import Gradient


def dense_if_compiled(
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    by_rows: Container[int],
) -> list[Any]:
    """Returns the gradients of a replica, dense in compiled code where a sparse one saves nothing.

    XLA compiles no tensors of which the size depends on the examples, and so no merging of rows. A
    sparse gradient saves nothing if all replicas look up at least as many rows as the table has. On
    one replica it also saves nothing if the optimizer computes on all rows; several replicas would
    send all rows of a dense gradient to each other. Replica context, in a graph.

    Not for microbatches, of which `GradientSums` adds up the rows.

    Args:
      gradients: The gradients, one per variable; None where the loss does not depend on it.
      variables: The variables.
      by_rows: `id` of each variable of which the optimizer updates single rows.
    """
    if not is_compiled():
        return list(gradients)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync

    def is_dense(rows: int | None, variable: keras.Variable) -> bool:
        if rows is None:
            return False
        few = rows * replicas < variable.shape[0]
        return not few or (replicas == 1 and id(variable) not in by_rows)

    return [
        tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
        if isinstance(gradient, tf.IndexedSlices) and is_dense(gradient.indices.shape[0], variable)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
