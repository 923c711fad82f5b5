"""What a model's forward pass changes beside its weights: the moments of BatchNormalization.

Each replica may hold values of its own (of a layer that is not synchronized), and a skipped
update must leave them as they were.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Statistics:
    """The variables of a model that are floating-point numbers and not trained."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        """Finds them, and lets CentralStorageStrategy's replicas write them."""
        self._strategy = strategy
        self.variables = [
            variable.value
            for variable in model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        ]
        for variable in self.variables:
            if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
                # Keras gives no aggregation, without which TensorFlow refuses to write the one
                # copy from several replicas.
                variable._aggregation = tf.VariableAggregation.MEAN

    def values(self) -> list[Any]:
        """The values on every replica, as they are now. Cross-replica context, in a graph."""
        return self._strategy.run(lambda: [variable.read_value() for variable in self.variables])

    def restore(self, values: list[Any]) -> None:
        """Sets every replica's back to what `values` gave. Cross-replica context, in a graph."""
        for variable, value in zip(self.variables, values, strict=True):
            self._strategy.extended.update(variable, _assign, args=(value,))


def average_over_replicas(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Sets every replica's copy of each variable to the mean of all. Eager, cross-replica context.

    Where the copies agree, their value stays to the bit.
    """
    for variable in variables:
        first, *others = strategy.experimental_local_results(variable)
        if others:
            start = first.read_value()
            distances = [other.read_value() - start for other in others]
            variable.assign(start + tf.add_n(distances) / (1 + len(others)))


def _assign(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    return variable.assign(value)
