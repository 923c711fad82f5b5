"""The parts of a gradient that the optimizers of parameter groups update."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """The part of a gradient that an optimizer updates.

    Attributes:
      optimizer: The optimizer.
      places: Places of its variables in the gradient.
      frozen_until: First step at which it updates its variables.
    """

    optimizer: keras.optimizers.Optimizer
    places: Sequence[int]
    frozen_until: int = 0


def unless_frozen(part: OptimizerPart, step: tf.Tensor, update: Any) -> None:
    """Calls a function that updates variables, unless its part is frozen. Cross-replica context.

    Args:
      part: The part.
      step: Number of updates made before this one, int64 [].
      update: The function; takes no arguments.
    """
    if not part.frozen_until:
        update()
        return

    def updated() -> tf.Tensor:
        update()
        return tf.constant(True)

    tf.cond(step >= part.frozen_until, updated, lambda: tf.constant(False))
