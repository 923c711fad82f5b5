"""What a model's forward pass changes beside its weights: the moments of BatchNormalization.

Each replica may hold values of its own (of a layer that is not synchronized), and a skipped
update must leave them as they were.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf


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


def synchronize(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Sets every replica's copy of each variable to the mean of all. Eager, cross-replica context.

    Where the copies agree, their value stays to the bit.
    """
    for variable in variables:
        first, *others = strategy.experimental_local_results(variable)
        if others:
            start = first.read_value()
            # Equal infinities have no distance.
            distances = [_distance(start, other.read_value()) for other in others]
            variable.assign(start + tf.add_n(distances) / (1 + len(others)))


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
