"""Values of variables at one time, to which a skipped update returns."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class KeptValues:
    """The values of variables on every replica, read when this object is made.

    They are copies, so that `restore` is exact to the bit. Cross-replica context, in a graph.
    """

    def __init__(self, variables: Sequence[tf.Variable], strategy: tf.distribute.Strategy):
        """Reads the variables.

        Args:
          variables: The strategy's variables; they may differ between replicas.
          strategy: The strategy.
        """
        self._variables = list(variables)
        self._strategy = strategy
        self._values: list[Any] = strategy.run(lambda: [v.read_value() for v in self._variables])

    def restore(self) -> None:
        """Assigns the values on every replica."""
        for variable, value in zip(self._variables, self._values, strict=True):
            self._strategy.extended.update(variable, _assign, args=(value,))


def _assign(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    return variable.assign(value)
