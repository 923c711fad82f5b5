"""The state of a Keras metric as a vector of float64 sums."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.metrics.in_float64 import float64_by_default
from ddl.metrics.probabilities import remedy, takes_probabilities
from ddl.metrics.results import result_of


class KerasState:
    """The variables of a Keras metric, flattened one after the other; see `StateSums`.

    Attributes:
      size: Length of the vector.
      names: Text that each figure adds to the name of the metric; set by `name_figures`.
      is_mean: Whether the metric keeps a total and a count.
      takes_probabilities: Whether outputs outside of [0, 1] are an error.
    """

    def __init__(self, name: str, metric: keras.metrics.Metric, weight_rank: int):
        """Keeps the arguments.

        Args:
          name: Name of the metric, for errors.
          metric: In float64, with all of its variables. It is not changed.
          weight_rank: Number of first dimensions of the labels for which the metric takes weights.
        """
        self.names: tuple[str, ...] = ()
        self._name = name
        self._metric = metric
        self._weight_rank = weight_rank
        self._result = result_of(metric)
        self._shapes = [tuple(v.shape) for v in metric.variables]
        self._kept = [not _is_unused(metric, v) for v in metric.variables]
        self.takes_probabilities = takes_probabilities(metric)
        sizes = [math.prod(s) for s, keep in zip(self._shapes, self._kept, strict=True) if keep]
        self._ends = np.cumsum(sizes)
        self.is_mean = isinstance(metric, keras.metrics.Mean)
        self.size = sum(sizes) + self.takes_probabilities

    @property
    def variables(self) -> list[tuple[str, slice]]:
        """Name and place in the vector of each variable."""
        kept = [v for v, keep in zip(self._metric.variables, self._kept, strict=True) if keep]
        starts = [0, *self._ends[:-1]]
        return [
            (v.name, slice(first, end))
            for v, first, end in zip(kept, starts, self._ends, strict=True)
        ]

    def sums(
        self,
        labels: tf.Tensor,
        outputs: tf.Tensor,
        weight: tf.Tensor,
        prior: np.ndarray | None = None,
    ) -> tf.Tensor:
        """Returns the sums of a microbatch; see `ddl.metrics.values.StateSums`.

        Args:
          labels: [batch, …].
          outputs: [batch, …].
          weight: float64, of the first dimensions of labels and outputs; 0 for padding.
          prior: Sums to start from, float64 [size]; None: zeros.
        """
        rank = weight.shape.rank
        weight = tf.reshape(tf.cast(weight, tf.float64), [-1])
        counts = tf.not_equal(weight, 0)
        labels = _only_counted(_in_rows(labels, rank), counts)
        outputs = _only_counted(_in_rows(outputs, rank), counts)
        if self._weight_rank > 1:
            of_rows = tf.reshape(weight, [-1] + [1] * (self._weight_rank - 1))
            given = tf.broadcast_to(of_rows, tf.shape(labels)[: self._weight_rank])
        else:
            given = weight
        with float64_by_default():
            new = self._metric.stateless_update_state(
                self._states(prior), labels, outputs, sample_weight=given
            )
        kept = [one for one, keep in zip(new, self._kept, strict=True) if keep]
        parts = [tf.reshape(tf.cast(one, tf.float64), [-1]) for one in kept]
        if self.takes_probabilities:
            inside = (outputs >= 0) & (outputs <= 1)
            parts.append([tf.reduce_sum(tf.cast(~inside, tf.float64))])
        vector = tf.concat(parts, axis=0)
        return tf.where(tf.reduce_any(counts), vector, tf.zeros_like(vector))

    def figures(self, sums: np.ndarray) -> tuple[float, ...]:
        """Returns the figures; see `ddl.metrics.values.StateSums`.

        Raises:
          ConfigError: If outputs were no probabilities, but the metric takes such.
        """
        if self.takes_probabilities and sums[-1] > 0:
            raise ConfigError(
                f"The metric {self._name!r} ({type(self._metric).__name__}) takes probabilities, "
                f"but {sums[-1]:.0f} outputs were outside of [0, 1]. {remedy(self._metric)}"
            )
        return tuple(float(x) for _, x in _flat(self._result(self._values(sums))))

    def name_figures(self, sums: np.ndarray) -> None:
        """Sets the names of the figures, from those of some sums."""
        self.names = tuple(name for name, _ in _flat(self._result(self._values(sums))))

    def _values(self, sums: np.ndarray) -> list[np.ndarray]:
        """Splits the vector into the values of all variables; 0 for those that are not kept."""
        parts = iter(np.split(np.asarray(sums, np.float64), self._ends))
        return [
            next(parts).reshape(shape) if keep else np.zeros(shape)
            for shape, keep in zip(self._shapes, self._kept, strict=True)
        ]

    def _states(self, prior: np.ndarray | None) -> list[tf.Tensor]:
        values = self._values(np.zeros(self.size) if prior is None else prior)
        dtypes = [v.dtype for v in self._metric.variables]
        return [tf.constant(x, dtype) for x, dtype in zip(values, dtypes, strict=True)]


def _in_rows(values: tf.Tensor, rank: int) -> tf.Tensor:
    """Returns values [batch, …] with the first `rank` dimensions as one; floats as float64."""
    if values.dtype.is_floating:
        values = tf.cast(values, tf.float64)
    if rank == 1:
        return values
    return tf.reshape(values, [-1, *values.shape[rank:]])


def _only_counted(values: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Replaces the rows that do not count, which may hold NaN, by the first one that does."""
    first = tf.argmax(tf.cast(counts, tf.float32))
    rows = tf.range(tf.size(counts, tf.int64), dtype=tf.int64)
    return tf.gather(values, tf.where(counts, rows, first))


def _flat(result: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
    """Returns the numbers of a result, with the paths to them."""
    if isinstance(result, dict):
        return [pair for key, one in result.items() for pair in _flat(one, f"{name}/{key}")]
    if isinstance(result, list | tuple):
        return [pair for key, one in enumerate(result) for pair in _flat(one, f"{name}/{key}")]
    array = np.asarray(result)
    if array.ndim == 0:
        return [(name, array)]
    return [pair for key, one in enumerate(array) for pair in _flat(one, f"{name}/{key}")]


def _is_unused(metric: Any, variable: keras.Variable) -> bool:
    """Whether a variable counts padding, but the result does not depend on it."""
    kind = keras.metrics.R2Score
    return (
        isinstance(metric, kind)
        and type(metric).result is kind.result
        and metric.num_regressors == 0
        and variable is metric.num_samples
    )
