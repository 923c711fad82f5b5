"""An exponential moving average of the weights, which often evaluates better than they do."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.statistics import kept

AVERAGE_PREFIX = "average/"
"""What the name of an average has before that of its weight."""


@dataclasses.dataclass(frozen=True)
class ExponentialMovingAverage:
    """The rule: average ← average + (1 - d)·(weight - average), once an update.

    Ruppert 1988 and Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
    averaging", take plain means; this one forgets, at the decay d. With a warm-up, that of
    tf.train.ExponentialMovingAverage, d = min(decay, (1 + t) / (10 + t)) at update number t,
    counted from 1: the average forgets the first weights soon, however slow it is later.

    Attributes:
      decay: Share of the average that stays in an update, between 0 and 1.
      warm_up: Whether the decay begins small.
    """

    decay: float = 0.999
    warm_up: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"the decay of the weight average is {self.decay}; 0 ≤ decay < 1")

    def __str__(self) -> str:
        return f"decay {self.decay:g}{', with a warm-up' if self.warm_up else ''}"

    def decay_at(self, update: tf.Tensor) -> tf.Tensor:
        """The decay of update number `update`, int64 []: float64 []."""
        decay = tf.constant(self.decay, tf.float64)
        if not self.warm_up:
            return decay
        count = tf.cast(update, tf.float64)
        return tf.minimum(decay, (1 + count) / (10 + count))


class WeightAverages:
    """The averages of a model's weights and statistics, one variable for each.

    What BatchNormalization has learned of the activations belongs to the weights that gave them,
    so its moving moments are averaged along with these.
    """

    def __init__(
        self,
        rule: ExponentialMovingAverage,
        weights: Sequence[tf.Variable],
        strategy: tf.distribute.Strategy,
    ):
        """Starts at the present values of the weights and statistics given."""
        self.rule = rule
        self._strategy = strategy
        self._weights = list(weights)
        with strategy.scope():
            self.variables = [
                tf.Variable(
                    weight, trainable=False, name=f"{AVERAGE_PREFIX}{weight.name.split(':')[0]}"
                )
                for weight in self._weights
            ]

    def update(self, update: tf.Tensor) -> None:
        """Moves the averages after update number `update`, int64 []. Cross-replica, in a graph."""
        step = 1 - self.rule.decay_at(update)

        def move(average: tf.Variable, weight: tf.Tensor) -> tf.Operation:
            return average.assign_add(tf.cast(step, average.dtype) * (weight - average))

        def move_unless_equal(average: tf.Variable, weight: tf.Tensor) -> tf.Operation:
            # What is not trained may be infinite, such as a mask, and then has no distance.
            weight = tf.convert_to_tensor(weight)
            distance = tf.where(tf.equal(weight, average), tf.zeros_like(weight), weight - average)
            return average.assign_add(tf.cast(step, average.dtype) * distance)

        for average, weight in zip(self.variables, self._weights, strict=True):
            how = move if weight.trainable else move_unless_equal
            self._strategy.extended.update(average, how, args=(weight,))

    def of(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """The averages of some of the model's variables."""
        averages = dict(zip(map(id, self._weights), self.variables, strict=True))
        return [averages[id(variable)] for variable in variables]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averages in the `with` block, and its own weights back after it.

        They come back to the bit, also when the block raises. Eager, cross-replica context.
        """
        with kept(copy for weight in self._weights for copy in self._copies(weight)):
            for average, weight in zip(self.variables, self._weights, strict=True):
                for copy, value in zip(self._copies(weight), self._copies(average), strict=True):
                    copy.assign(value)
            yield

    def reset(self) -> None:
        """Sets the averages to the present values. Eager, cross-replica context."""
        for average, weight in zip(self.variables, self._weights, strict=True):
            for copy, value in zip(self._copies(average), self._copies(weight), strict=True):
                copy.assign(value)

    def _copies(self, variable: Any) -> tuple[tf.Variable, ...]:
        """Each local replica's copy."""
        return self._strategy.experimental_local_results(variable)
