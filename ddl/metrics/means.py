"""Metrics made of means: functions of one, means with weights of their own, means by class."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, check_takes
from ddl.metrics.values import Inputs, OfMean


class FunctionOfMean:
    """A function of the weighted mean over all examples, or tokens, of a period.

        root = ddl.metrics.FunctionOfMean(math.sqrt)
        …
        return ddl.PerExample(loss, {"rmse": root(tf.square(labels - outputs))})

    The mean of the function's values on each batch would differ. Where the function has no value,
    such as the logarithm of 0, the figure is NaN; where that is too large for a float, infinity.
    """

    def __init__(self, function: Callable[[float], float]):
        """Keeps the function.

        Args:
          function: From the mean, a Python float, to the figure. Called on the host.

        Raises:
          ConfigError: If it is not a function of one argument.
        """
        check_takes("FunctionOfMean.function", function, ("mean",))
        self._function = function

    def __call__(self, values: Any) -> OfMean:
        """Returns a value for `ddl.PerExample.metrics`. Replica context.

        Args:
          values: float, of the shape of the loss.
        """
        return OfMean(tf.convert_to_tensor(values), self._function)


class Perplexity(FunctionOfMean):
    """The exponential of the mean cross-entropy: `{"perplexity": Perplexity()(loss)}`."""

    def __init__(self) -> None:
        """Initializes the metric."""
        super().__init__(math.exp)


class MeanByClass:
    """The weighted mean of a value over the examples of each class.

        by_class = ddl.metrics.MeanByClass(num_classes=10)
        …
        return ddl.PerExample(loss, {"loss_by_class": by_class(labels, loss)})

    The figure "loss_by_class/3" is the mean over the examples of class 3, exact over microbatches,
    replicas, workers and updates; NaN if there are none. Labels outside of the classes, such as -1,
    count for no class.
    """

    def __init__(self, num_classes: int):
        """Keeps the number of classes.

        Args:
          num_classes: Number of classes.
        """
        self._names = [f"/{number}" for number in range(num_classes)]

    def __call__(self, labels: Any, values: Any, weight: Any = None) -> Inputs:
        """Returns a value for `ddl.PerExample.metrics`. Replica context.

        Args:
          labels: Classes, integer [batch, …].
          values: float, of the shape of the labels.
          weight: As in `ddl.metrics.KerasMetric`.

        Raises:
          ConfigError: If labels are no integers, or the shapes differ.
        """
        labels, values = tf.convert_to_tensor(labels), tf.convert_to_tensor(values)
        if not labels.dtype.is_integer or not labels.shape.is_compatible_with(values.shape):
            raise ConfigError(
                "MeanByClass needs a class number for each value, got labels of "
                f"{labels.dtype.name} of shape {tuple(labels.shape)} for values of shape "
                f"{tuple(values.shape)}. For one-hot labels pass tf.argmax(labels, -1)."
            )
        return Inputs(self, labels, values, weight)

    def state(self, name: str, labels: Any, outputs: Any, rank: int) -> "SumsByClass":
        """Returns the sums; see `ddl.metrics.values.Inputs`. They add up for any inputs."""
        return SumsByClass(self._names)


class WeightedMean:
    """A mean with weights of its own, where a tensor in `metrics` has those of the loss.

    return ddl.PerExample(loss, {"head_loss": WeightedMean()(other, weight)})
    """

    def __call__(self, values: Any, weight: Any) -> Inputs:
        """Returns a value for `ddl.PerExample.metrics`. Replica context.

        Args:
          values: float [batch, …].
          weight: float [batch, …], of the first dimensions of the values; times the example weight.
        """
        values = tf.convert_to_tensor(values)
        return Inputs(self, tf.zeros_like(values, tf.int64), values, weight)

    def state(self, name: str, labels: Any, outputs: Any, rank: int) -> "SumsByClass":
        """Returns the sums; see `ddl.metrics.values.Inputs`."""
        return SumsByClass([""])


class SumsByClass:
    """Σ weight·value and Σ weight of each class; see `ddl.metrics.values.StateSums`."""

    def __init__(self, names: Sequence[str]):
        """Makes the layout of classes whose figures have these names."""
        self.names = tuple(names)
        self.size = 2 * len(names)

    def sums(self, labels: tf.Tensor, outputs: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """See `ddl.metrics.values.StateSums`."""
        missing = [1] * (labels.shape.rank - weight.shape.rank)
        weight = tf.reshape(weight, [*weight.shape, *missing])
        weight = tf.broadcast_to(weight, tf.shape(labels))
        weight, values = (tf.reshape(tf.cast(x, tf.float64), [-1]) for x in (weight, outputs))
        values = tf.where(tf.equal(weight, 0), tf.zeros_like(values), values)  # may hold NaN
        labels = tf.cast(tf.reshape(labels, [-1, 1]), tf.int64)
        of_class = tf.equal(labels, tf.range(len(self.names), dtype=tf.int64))
        # Not times 0 or 1, by which an infinite value would spoil the sums of all classes.
        both = [
            tf.reduce_sum(tf.where(of_class, each[:, tf.newaxis], tf.zeros_like(each[:1])), axis=0)
            for each in (weight * values, weight)
        ]
        return tf.concat(both, axis=0)

    def figures(self, sums: np.ndarray) -> tuple[float, ...]:
        """See `ddl.metrics.values.StateSums`."""
        totals, weights = np.reshape(sums, [2, -1])
        means = np.full(len(self.names), np.nan)
        np.divide(totals, weights, out=means, where=weights != 0)
        return tuple(means.tolist())
