"""Norms of whole variables from their shares, for optimizers with a rate for each layer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from ddl.optimizers.layerwise import ByNorms
from ddl.step.sharding.optimizers import Sharding
from ddl.step.sharding.shares import entries_of_share


def norms_given(
    sharding: Sharding,
    optimizer: keras.optimizers.Optimizer,
    shares: list[Any],
    variables: Sequence[keras.Variable],
    stand_ins: Sequence[keras.Variable],
) -> AbstractContextManager[None]:
    """Returns a block in which an optimizer has the norms of whole variables, if it needs them.

    Cross-replica context, in a graph.

    Args:
      sharding: The shares.
      optimizer: The optimizer.
      shares: The gradients in shares, as the optimizer gets them.
      variables: The variables that it updates.
      stand_ins: Their stand-ins, which hold the shares of the weights.
    """
    if not isinstance(optimizer, ByNorms):
        return nullcontext()

    def squares(own: list[tf.Tensor]) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        found = []
        compared = optimizer.compared(own, stand_ins)
        for variable, stand_in, other in zip(variables, stand_ins, compared, strict=True):
            # Padding may hold no numbers, such as 0/0.
            shape = variable.value.shape
            entries = entries_of_share(shape, replica, context.num_replicas_in_sync)
            pair = [] if other is None else [tf.convert_to_tensor(stand_in.value), other]
            found += [_square(value[:entries]) for value in pair] or [tf.zeros([], tf.float64)] * 2
        return tf.stack(found)

    totals = sharding.total(sharding.strategy.run(squares, args=(shares,)))
    norms = tf.unstack(tf.reshape(tf.sqrt(totals), [len(variables), 2]))
    return optimizer.with_norms(stand_ins, norms)


def _square(values: tf.Tensor) -> tf.Tensor:
    """Returns the squared norm, float64 []."""
    wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    return 2 * tf.cast(tf.nn.l2_loss(wide), tf.float64)
