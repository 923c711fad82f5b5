"""Means of values over the examples of each class, such as the loss by class."""

from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.metrics.values import Inputs


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

        Raises:
          ConfigError: If it is no integer of at least 1.
        """
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
            raise ConfigError(
                f"MeanByClass.num_classes must be an integer of at least 1, got {num_classes!r}."
            )
        self._num_classes = num_classes

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
        return Inputs(
            self, labels, values, None if weight is None else tf.convert_to_tensor(weight)
        )

    def state(
        self, name: str, labels: tf.TensorSpec, outputs: tf.TensorSpec, rank: int
    ) -> "SumsByClass":
        """Returns the sums; see `ddl.metrics.values.Metric`. They add up for any inputs."""
        return SumsByClass(self._num_classes)


class SumsByClass:
    """Σ weight·value and Σ weight of each class; see `ddl.metrics.values.StateSums`.

    Attributes:
      size: Length of the vector.
      names: Text that each figure adds to the name of the metric: "/0", "/1", ….
    """

    def __init__(self, num_classes: int):
        """Makes the layout of some classes."""
        self._num_classes = num_classes
        self.size = 2 * num_classes
        self.names = tuple(f"/{number}" for number in range(num_classes))

    def sums(self, labels: tf.Tensor, outputs: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """See `ddl.metrics.values.StateSums`."""
        missing = [1] * (labels.shape.rank - weight.shape.rank)
        weight = tf.reshape(weight, [*weight.shape, *missing])
        weight = tf.reshape(tf.broadcast_to(weight, tf.shape(labels)), [-1])
        values = tf.reshape(tf.cast(outputs, tf.float64), [-1])
        values = tf.where(tf.equal(weight, 0), tf.zeros_like(values), values)  # may hold NaN
        labels = tf.cast(tf.reshape(labels, [-1, 1]), tf.int64)
        of_class = tf.equal(labels, tf.range(self._num_classes, dtype=tf.int64))
        # Not times 0 or 1, by which an infinite value would spoil the sums of all classes.
        both = [
            tf.reduce_sum(tf.where(of_class, each[:, tf.newaxis], tf.zeros_like(each[:1])), axis=0)
            for each in (weight * values, weight)
        ]
        return tf.concat(both, axis=0)

    def figures(self, sums: np.ndarray) -> tuple[float, ...]:
        """See `ddl.metrics.values.StateSums`."""
        totals, weights = np.reshape(sums, [2, -1])
        means = np.full(self._num_classes, np.nan)
        np.divide(totals, weights, out=means, where=weights != 0)
        return tuple(means.tolist())
