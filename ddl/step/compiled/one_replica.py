"""An optimizer's update on one replica, as if there were no others.

Keras's optimizers update variables in cross-replica context, which a compiled piece cannot enter.
Gradients are already equal on all replicas, so each replica can update its own copies.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from ddl.optimizers.checks import refusing_reductions


def is_first_replica() -> bool:
    """Returns whether this thread traces the first replica of this process, or no replica."""
    return _local_replica() == 0


def _local_replica() -> int:
    context = tf.distribute.get_replica_context()
    if context is None:  # the update context of `strategy.extended.update`
        replica = distribute_lib.get_update_replica_id()
        return replica if isinstance(replica, int) else 0
    # Private to TensorFlow, like the other names here; tests/step/compiled guards them.
    return int(context._local_replica_id)


@contextmanager
def alone(
    variables: Iterable[keras.Variable], optimizers: Iterable[keras.optimizers.Optimizer]
) -> Iterator[None]:
    """Makes this replica the only one within the `with` block, with its own copies of variables.

    Replica context; the block must not communicate with other replicas. While it is traced, no
    other thread traces.

    Args:
      variables: Variables of Keras that the block reads or writes, without those of optimizers.
      optimizers: Optimizers that it applies.

    Raises:
      ConfigError: If the block sums over the replicas.
    """
    replica = _local_replica()
    results = tf.distribute.get_strategy().experimental_local_results
    default = distribute_lib._get_default_strategy()
    optimizers = list(optimizers)
    every = [*variables, *(v for optimizer in optimizers for v in optimizer.variables)]
    with ExitStack() as stack:
        stack.enter_context(tf.distribute.ReplicaContext(default, replica))
        stack.enter_context(refusing_reductions(default))
        for variable in {id(v): v for v in every}.values():
            copies = results(variable._value)
            own = copies[replica] if len(copies) > 1 else copies[0]
            stack.enter_context(_replaced(variable, "_value", own))
        for optimizer in optimizers:
            stack.enter_context(_replaced(optimizer, "_distribution_strategy", default))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute within the `with` block, past the owner's tracking of attributes."""
    earlier = vars(owner)[name]
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner)[name] = earlier
