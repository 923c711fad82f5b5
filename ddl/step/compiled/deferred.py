"""Gradients that are still to be divided by the sum of the weights and by the loss scale.

A compiled update multiplies them itself, in the pass that changes the variables. A piece of its own
would read and write all gradients once more.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ddl.step.gradients import multiply


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Values of gradients, and the factor that is missing. Iterating multiplies them.

    Attributes:
      strategy: The strategy.
      values: One reduced value per variable.
      factor: Computes the factor, float64 []; in a compiled piece.
    """

    strategy: tf.distribute.Strategy
    values: list[Any]
    factor: Callable[[], tf.Tensor]

    def __iter__(self) -> Iterator[Any]:
        factor = self.factor()
        return iter(self.strategy.run(multiply, args=(self.values, factor)))
