"""An exponential moving average of the weights, which often evaluates better than the weights."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl.distribution.path import path_of
from ddl.errors import ConfigError
from ddl.step.compiled.compiler import Compiler
from ddl.step.moving_statistics import restoring
from ddl.step.packing import Packed

AVERAGE_PREFIX = "average/"
"""Prefix of the name of an average, before the name of its weight."""


@dataclasses.dataclass(frozen=True)
class ExponentialMovingAverage:
    """An average of the weights: average ← average + (1 - d)·(weight - average), once per update.

    Ruppert 1988 and Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
    averaging", take plain means; this average forgets at the decay d. The warm-up is that of
    tf.train.ExponentialMovingAverage: d = min(decay, (1 + t) / (10 + t)) at update number t,
    counted from 1. With it the average soon forgets the first weights, even if `decay` is near 1.

    Attributes:
      decay: Share of the average that an update keeps, at least 0 and below 1.
      warm_up: Whether the decay starts small.

    Raises:
      ConfigError: If `decay` is out of range.
    """

    decay: float = 0.999
    warm_up: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"ExponentialMovingAverage.decay must be at least 0 and below 1, got {self.decay}."
            )

    def __str__(self) -> str:
        return f"decay {self.decay:g}{', with a warm-up' if self.warm_up else ''}"

    def decay_at(self, update: tf.Tensor) -> tf.Tensor:
        """Returns the decay, float64 [], of update number `update`, int64 [], counted from 1."""
        decay = tf.constant(self.decay, tf.float64)
        if not self.warm_up:
            return decay
        count = tf.cast(update, tf.float64)
        return tf.minimum(decay, (1 + count) / (10 + count))

    def step_at(self, update: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns 1 - `decay_at`, of a dtype [], with few operations and other rounding."""
        least = tf.constant(1 - self.decay, dtype)
        if not self.warm_up:
            return least
        return tf.maximum(least, 9 / tf.cast(update + 10, dtype))


class WeightAverages:
    """The averages of a model's weights and statistics, one variable for each.

    The moving moments of BatchNormalization belong to the weights that produced the activations, so
    they are averaged along with the weights.

    Attributes:
      rule: The averaging rule.
      variables: The averages, one variable for each weight or statistic.
    """

    def __init__(
        self,
        rule: ExponentialMovingAverage,
        weights: Sequence[tf.Variable],
        strategy: tf.distribute.Strategy,
    ):
        """Starts at the present values of `weights`, which may include statistics."""
        self.rule = rule
        self._strategy = strategy
        self._weights = list(weights)
        with strategy.scope():
            self.variables = [
                tf.Variable(
                    weight,
                    trainable=False,
                    name=f"{AVERAGE_PREFIX}{weight.name.split(':')[0]}",
                )
                for weight in self._weights
            ]

    def update(self, update: tf.Tensor, compiler: Compiler) -> None:
        """Moves the averages. Cross-replica context, in a graph.

        Args:
          update: Number of the update that was made, int64 [], counted from 1.
          compiler: Compiles what each replica does, or not.
        """
        if path_of(self._strategy).packs_tensors or compiler.is_on:
            narrow = all(variable.dtype == tf.float32 for variable in self.variables)
            step = self.rule.step_at(update, tf.float32 if narrow else tf.float64)
            self._strategy.extended.update(
                self.variables[0],
                lambda _, step: compiler(lambda: self._move_buffers(step)),
                args=(step,),
                group=False,
            )
            return
        step = 1 - self.rule.decay_at(update)

        def move(average: tf.Variable, weight: tf.Tensor) -> tf.Operation:
            return average.assign_add(tf.cast(step, average.dtype) * (weight - average))

        def move_unless_equal(average: tf.Variable, weight: tf.Tensor) -> tf.Operation:
            # A variable that is not trained may be infinite, such as a mask; inf - inf is NaN.
            weight = tf.convert_to_tensor(weight)
            distance = tf.where(tf.equal(weight, average), tf.zeros_like(weight), weight - average)
            return average.assign_add(tf.cast(step, average.dtype) * distance)

        for average, weight in zip(self.variables, self._weights, strict=True):
            how = move if weight.trainable else move_unless_equal
            self._strategy.extended.update(average, how, args=(weight,))

    def _move_buffers(self, step: tf.Tensor) -> None:
        """Moves one replica's averages as `update` does, with few kernels."""
        averages = [tf.convert_to_tensor(average) for average in self.variables]
        weights = [tf.convert_to_tensor(weight) for weight in self._weights]
        packed = Packed(averages)
        moved = list(packed.buffers)
        pairs = zip(packed.buffers, packed.alike(weights), strict=True)
        for number, (average, weight) in enumerate(pairs):
            group = packed.places[number]
            distance = average - weight
            if not all(self._weights[place].trainable for place in group):
                # See `move_unless_equal`.
                equal = tf.equal(weight, average)
                distance = tf.where(equal, tf.zeros_like(distance), distance)
            own = tf.cast(step, average.dtype)
            if len(group) == 1 and average.dtype != tf.bfloat16:  # GPUs have no kernel for it
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=self.variables[group[0]].handle, alpha=own, delta=distance
                )
            else:
                moved[number] = average - own * distance
        values = packed.unpacked(moved, True)
        for variable, value, before in zip(self.variables, values, averages, strict=True):
            if value is not before:
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    def of(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Returns the averages of the given model variables."""
        averages = dict(zip(map(id, self._weights), self.variables, strict=True))
        return [averages[id(variable)] for variable in variables]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Assigns the averages to the model within the `with` block.

        Afterwards the model's own weights are restored bit for bit, also when the block raises.
        Eager, cross-replica context.
        """
        with restoring(copy for weight in self._weights for copy in self._copies(weight)):
            for average, weight in zip(self.variables, self._weights, strict=True):
                _assign_all(self._copies(weight), self._copies(average))
            yield

    def reset(self) -> None:
        """Sets the averages to the present values. Eager, cross-replica context."""
        for average, weight in zip(self.variables, self._weights, strict=True):
            _assign_all(self._copies(average), self._copies(weight))

    def _copies(self, variable: Any) -> tuple[tf.Variable, ...]:
        """Returns the copy of each replica of this worker."""
        return self._strategy.experimental_local_results(variable)


def _assign_all(variables: Sequence[tf.Variable], values: Sequence[tf.Variable]) -> None:
    """Assigns values to variables on the same devices, without passing through another one."""
    for variable, value in zip(variables, values, strict=True):
        with tf.device(variable.device):
            variable.assign(value)
