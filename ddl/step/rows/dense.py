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
    parts: int,
) -> list[Any]:
    """Returns gradients of a microbatch, dense in compiled code where a sparse one saves nothing.

    XLA compiles no tensors of which the size depends on the examples, and so no merging of rows. A
    sparse gradient saves nothing if all microbatches look up at least as many rows as the table
    has. On one replica it also saves nothing if the optimizer computes on all rows; several
    replicas would send all rows of a dense gradient to each other. Replica context, in a graph.

    Args:
      gradients: The gradients, one per variable; None where the loss does not depend on it.
      variables: The variables.
      by_rows: `id` of each variable of which the optimizer updates single rows.
      parts: Microbatches of all replicas in an update.
    """
    if not is_compiled():
        return list(gradients)
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1

    def is_dense(rows: int | None, variable: keras.Variable) -> bool:
        if rows is None:
            return False
        return rows * parts >= variable.shape[0] or (is_alone and id(variable) not in by_rows)

    return [
        tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.IndexedSlices) and is_dense(gradient.indices.shape[0], variable)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
