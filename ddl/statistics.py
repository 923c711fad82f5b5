"""What a model's forward pass changes beside its weights: the moments of BatchNormalization.

Each replica may hold values of its own (of a layer that is not synchronized), and a skipped
update must leave them as they were.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.workers import Workers


class Statistics:
    """The variables that layers write in their forward pass."""

    def __init__(self, layers: Iterable[keras.layers.Layer], strategy: tf.distribute.Strategy):
        """Finds them: what a layer made not to be trained, in the strategy's scope.

        So frozen weights are none, nor is what a layer learned outside, such as Normalization's
        moments: the replicas read these alone.
        """
        self._strategy = strategy
        made = [v.value for layer in layers for v in layer._non_trainable_variables]
        self.variables = [v for v in made if strategy.extended.variable_created_in_scope(v)]

    @property
    def floating(self) -> list[tf.Variable]:
        """Those that can be averaged."""
        return [variable for variable in self.variables if variable.dtype.is_floating]

    def values(self) -> list[Any]:
        """The values on every replica, as they are now. Cross-replica context, in a graph."""
        return self._strategy.run(lambda: [variable.read_value() for variable in self.variables])

    def restore(self, values: list[Any]) -> None:
        """Sets every replica's back to what `values` gave. Cross-replica context, in a graph."""
        for variable, value in zip(self.variables, values, strict=True):
            self._strategy.extended.update(variable, _assign, args=(value,))


@contextmanager
def kept(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Gives variables their values back after the `with` block, to the bit, also when it raises."""
    own = [(variable, variable.read_value()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in own:
            variable.assign(value)


def values_everywhere(
    all_copies: Sequence[Sequence[tf.Variable]], workers: Workers
) -> list[list[tf.Tensor]]:
    """What all replicas have, those of other workers too. Eager, cross-replica context, on all.

    Args:
      all_copies: For each variable the copy of every replica of this worker.
      workers: Each of which has as many.

    Returns:
      For each variable every replica's value, in the order of replicas.
    """
    own = [[copy.read_value() for copy in copies] for copies in all_copies]
    if workers.number == 1 or not own:
        return own
    # All in one message. float64 holds the values of any narrower type.
    flat = [np.reshape(value.numpy(), -1).astype(np.float64) for values in own for value in values]
    rows = workers.rows(np.concatenate(flat))
    ends = np.cumsum([len(part) for part in flat])[:-1]
    parts = iter(np.split(rows, ends, axis=1))
    everywhere = []
    for values in own:
        stacked = np.stack([next(parts) for _ in values], axis=1)  # [workers, replicas, n]
        stacked = stacked.reshape(-1, *values[0].shape)
        everywhere.append([tf.constant(value, values[0].dtype) for value in stacked])
    return everywhere


@contextmanager
def synchronized(all_copies: Sequence[Sequence[tf.Variable]], workers: Workers) -> Iterator[None]:
    """Gives the replicas' copies of each variable their mean in the `with` block.

    Where the copies agree, their value stays to the bit. Eager, cross-replica context, on all
    workers.

    Args:
      all_copies: For each variable the copy of every replica of this worker.
      workers: Each of which has as many.
    """
    with kept(copy for copies in all_copies for copy in copies):
        everywhere = values_everywhere(all_copies, workers)
        for copies, (start, *others) in zip(all_copies, everywhere, strict=True):
            if not others:
                continue
            # Equal infinities have no distance.
            distances = [_distance(start, other) for other in others]
            mean = start + tf.add_n(distances) / (1 + len(others))
            for copy in copies:
                copy.assign(mean)
        yield


def let_replicas_write(
    layers: Iterable[keras.layers.Layer], strategy: tf.distribute.Strategy
) -> None:
    """Lets layers write their variables in a forward pass under CentralStorageStrategy.

    There is one copy of each, and Keras does not say how the values of several replicas make
    one, without which TensorFlow refuses: numbers are averaged, counts are the first replica's.
    """
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        for layer in layers:
            for variable in layer.variables:
                floating = variable.value.dtype.is_floating
                how = tf.VariableAggregation
                variable.value._aggregation = how.MEAN if floating else how.ONLY_FIRST_REPLICA


def _distance(start: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.equal(start, other), tf.zeros_like(start), other - start)


def _assign(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    return variable.assign(value)
