"""An exponential moving average of the weights, which often evaluates better than the weights."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError

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

    def share_at(self, update: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns 1 - d, of a dtype [], of update number `update`, int64 [], counted from 1."""
        least = tf.constant(1 - self.decay, dtype)
        return tf.maximum(least, 9 / tf.cast(update + 10, dtype)) if self.warm_up else least


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
                tf.Variable(v, trainable=False, name=f"{AVERAGE_PREFIX}{v.name.split(':')[0]}")
                for v in self._weights
            ]

    def move(self, update: tf.Tensor, compiled: Callable[..., Any] | None) -> None:
        """Moves the averages. Cross-replica context, in a graph.

        Args:
          update: Number of the update that was made, int64 [], counted from 1.
          compiled: Calls a function of no arguments as one compiled piece; None compiles nothing.
        """
        shares = {v.dtype: self.rule.share_at(update, v.dtype) for v in self.variables}
        pairs = list(zip(self.variables, self._weights, strict=True))

        def move(average: tf.Variable, weight: Any) -> None:
            before, value = tf.convert_to_tensor(average), tf.convert_to_tensor(weight)
            distance, share = before - value, shares[average.dtype]
            if not weight.trainable:
                # A variable that is not trained may be infinite, such as a mask; inf - inf is NaN.
                distance = tf.where(tf.equal(value, before), tf.zeros_like(value), distance)
            if average.dtype == tf.bfloat16:  # GPUs have no kernel for it
                average.assign_sub(share * distance, read_value=False)
            else:
                apply = tf.raw_ops.ResourceApplyGradientDescent
                apply(var=average.handle, alpha=share, delta=distance)

        def move_all() -> None:
            for pair in pairs:
                move(*pair)

        change = self._strategy.extended.update
        if compiled is not None:  # as one piece on each replica
            change(self.variables[0], lambda _: compiled(move_all), group=False)
        else:
            for average, weight in pairs:
                change(average, move, args=(weight,), group=False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Assigns the averages to the model within the `with` block.

        Afterwards the model's own weights are restored bit for bit, also when the block raises.
        Eager, cross-replica context.
        """
        with restoring(copy for weight in self._weights for copy in self._copies(weight)):
            self._assign(self._weights, self.variables)
            yield

    def reset(self) -> None:
        """Sets the averages to the present values. Eager, cross-replica context."""
        self._assign(self.variables, self._weights)

    def _assign(self, variables: Sequence[tf.Variable], values: Sequence[tf.Variable]) -> None:
        """Assigns on the device of each replica, without passing through another one."""
        for pair in zip(variables, values, strict=True):
            for variable, value in zip(*map(self._copies, pair), strict=True):
                with tf.device(variable.device):
                    variable.assign(value)

    def _copies(self, variable: Any) -> tuple[tf.Variable, ...]:
        """Returns the copy of each replica of this worker."""
        return self._strategy.experimental_local_results(variable)


def weights_of(what: str, part: Any) -> list[tf.Variable]:
    """Returns the weights of a model or layer, or of a list of these or of variables."""
    parts, layer = part if isinstance(part, list | tuple) else [part], keras.layers.Layer
    weights = [v for x in parts for v in (x.weights if isinstance(x, layer) else [x])]
    if not weights or not all(hasattr(v, "assign") for v in weights):
        raise ConfigError(f"update.average: {what} must have weights, got {part!r:.80}.")
    own = {id(v): v for v in weights}  # a shared layer counts once
    return [v.value if isinstance(v, keras.Variable) else v for v in own.values()]


def move_towards(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Moves a variable by a share of the distance to a source; counters become the source."""
    source, before = tf.cast(source, variable.dtype), tf.convert_to_tensor(variable)
    if variable.dtype.is_floating:
        moved = before + tf.cast(share, variable.dtype) * (source - before)
        source = tf.where(tf.equal(share, 1) | tf.equal(source, before), source, moved)
    return variable.assign(source)


@contextmanager
def restoring(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Restores variables bit for bit after the `with` block, also when the block raises."""
    own = []
    for variable in variables:
        with tf.device(variable.device):  # an eager read goes through the first GPU
            own.append((variable, variable.read_value()))
    try:
        yield
    finally:
        for variable, value in own:
            variable.assign(value)
