"""The state of a Keras metric as a vector of float64 sums."""

import concurrent.futures
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError

_FLOATX = threading.RLock()


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Makes float64 Keras's default dtype within the `with` block.

    Keras's AUC and R2Score keep their state in the default dtype, whatever `dtype` they are given,
    and its accuracies count in it.
    """
    with _FLOATX:
        earlier = keras.config.floatx()
        keras.config.set_floatx("float64")
        try:
            yield
        finally:
            keras.config.set_floatx(earlier)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function eagerly, outside of all strategies and graphs, in float64."""
    # A new thread has no strategy and no graph. Only in a thread: a strategy would make a copy of
    # each variable for each replica.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(float64_by_default()(function), *arguments).result()


def takes_probabilities(metric: Any) -> bool:
    """Returns whether Keras clips the outputs to [0, 1], or compares them with 0.5 by default."""
    kinds = {kind.__name__ for kind in type(metric).__mro__}
    if "AUC" in kinds:
        return not metric._from_logits
    if kinds & {"Precision", "Recall", "_ConfusionMatrixConditionCount"}:
        return metric.init_thresholds is None and getattr(metric, "top_k", None) is None
    return "SensitivitySpecificityBase" in kinds


class KerasState:
    """The variables of a Keras metric, flattened one after the other; see `StateSums`.

    Attributes:
      size: Length of the vector.
      names: Text that each figure adds to the name of the metric; of the sums that `figures` had.
      takes_probabilities: Whether outputs outside of [0, 1] are an error.
      matters: bool [size], where the vector matters to the figures.
    """

    def __init__(self, name: str, metric: keras.metrics.Metric, weight_rank: int):
        """Keeps the arguments.

        Args:
          name: Name of the metric, for errors.
          metric: In float64, with all of its variables.
          weight_rank: Number of first dimensions of the labels for which the metric takes weights.
        """
        self.names: tuple[str, ...] = ()
        self.metric = metric
        self._name, self._weight_rank = name, weight_rank
        self.takes_probabilities = takes_probabilities(metric)
        sizes = [math.prod(v.shape) for v in metric.variables]
        self._ends = np.cumsum(sizes)
        self.size = sum(sizes) + self.takes_probabilities
        # R2Score counts padding in a variable on which its result depends only if adjusted.
        r2 = isinstance(metric, keras.metrics.R2Score) and not metric.num_regressors
        unused = [r2 and v is metric.num_samples for v in metric.variables]
        self.matters = ~np.repeat([*unused, False], [*sizes, self.size - sum(sizes)])

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
        rank, weight = weight.shape.rank, tf.reshape(tf.cast(weight, tf.float64), [-1])
        counts = tf.not_equal(weight, 0)
        labels, outputs = (_only_counted(x, rank, counts) for x in (labels, outputs))
        of_rows = tf.reshape(weight, [-1] + [1] * (self._weight_rank - 1))
        given = tf.broadcast_to(of_rows, tf.shape(labels)[: self._weight_rank])
        starts = self._values(np.zeros(self.size) if prior is None else prior)
        states = [tf.constant(x, v.dtype) for v, x in starts]
        with float64_by_default():
            after = self.metric.stateless_update_state(states, labels, outputs, sample_weight=given)
        parts = [tf.reshape(tf.cast(one, tf.float64), [-1]) for one in after]
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
                f"The metric {self._name!r} ({type(self.metric).__name__}) takes probabilities, "
                f"but {sums[-1]:.0f} outputs were outside of [0, 1]. Pass tf.sigmoid or "
                "tf.nn.softmax of the logits, or set from_logits=True or thresholds=0 if it has it."
            )
        for variable, value in self._values(sums):
            variable.assign(value)
        flat = _flat(self.metric.result())
        self.names = tuple(name for name, _ in flat)
        return tuple(float(x) for _, x in flat)

    def _values(self, sums: np.ndarray) -> list[tuple[keras.Variable, np.ndarray]]:
        """Returns the variables with their parts of the vector."""
        parts = np.split(np.asarray(sums, np.float64), self._ends)
        return [(v, x.reshape(v.shape)) for v, x in zip(self.metric.variables, parts, strict=False)]


def _only_counted(values: tf.Tensor, rank: int, counts: tf.Tensor) -> tf.Tensor:
    """Returns rows of the first `rank` dimensions, floats as float64.

    Rows that do not count, which may hold NaN, are replaced by the first one that does.
    """
    values = tf.cast(values, tf.float64) if values.dtype.is_floating else values
    values = values if rank == 1 else tf.reshape(values, [-1, *values.shape[rank:]])
    first = tf.argmax(tf.cast(counts, tf.float32))
    rows = tf.range(tf.size(counts, tf.int64), dtype=tf.int64)
    return tf.gather(values, tf.where(counts, rows, first))


def _flat(result: Any, name: str = "") -> list[tuple[str, Any]]:
    """Returns the numbers of a result, with the paths to them."""
    if not isinstance(result, dict | list | tuple):
        result = np.asarray(keras.ops.convert_to_numpy(result))
        if result.ndim == 0:
            return [(name, result)]
    pairs = result.items() if isinstance(result, dict) else enumerate(result)
    return [pair for key, one in pairs for pair in _flat(one, f"{name}/{key}")]
