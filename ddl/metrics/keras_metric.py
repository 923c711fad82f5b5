"""Metrics of Keras whose state adds up, exact over any devices, and the check that it does."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, did_you_mean
from ddl.metrics.state import KerasState, alone
from ddl.metrics.values import Inputs


class KerasMetric:
    """A metric of Keras whose state adds up over examples: AUC, F-score, MeanIoU, R² and others.

        self.auc = ddl.metrics.KerasMetric("AUC")
        …
        return ddl.PerExample(loss, {"auc": self.auc(labels, outputs)})

    Each replica computes the state of its examples in float64, from zero. The states are added like
    all metric sums: over microbatches, replicas, workers and updates. The figure is the result of
    the sum. It therefore equals that of Keras on all examples at once, with their weights and
    without padding. Results that are arrays or dicts become several figures, such as "f1/0".
    """

    def __init__(
        self, metric: str | keras.metrics.Metric, arguments: Mapping[str, Any] | None = None
    ):
        """Finds the class of the metric, and makes one to check the arguments.

        Args:
          metric: Name of a Keras metric, such as "AUC"; or a Keras metric, of which class and
            config are taken.
          arguments: Arguments of the class, with a name.

        Raises:
          ConfigError: If there is no such metric, or it does not take the arguments.
        """
        if not isinstance(metric, str) and (
            arguments or not isinstance(metric, keras.metrics.Metric)
        ):
            raise ConfigError(
                "KerasMetric takes the name of a Keras metric with arguments, or a Keras metric "
                f"alone, got {metric!r:.80} and {arguments!r:.80}. Name it: KerasMetric('AUC')."
            )
        self._class = _class_named(metric) if isinstance(metric, str) else type(metric)
        self._config = dict(arguments or {}) if isinstance(metric, str) else metric.get_config()
        self.kind = self._class.__name__
        """Name of the metric's class."""
        try:
            made = alone(self._made)
        except Exception as error:
            raise ConfigError(
                f"KerasMetric cannot make the metric {self.kind} in float64: {error} Correct its "
                "arguments, or its get_config."
            ) from None
        for name, value in () if isinstance(metric, str) else vars(metric).items():
            is_setting = isinstance(value, int | float | str) and name[0] != "_" and name != "name"
            known = getattr(metric, "dtype", None), getattr(made, name, value)
            if is_setting and value not in known:
                raise ConfigError(
                    f"KerasMetric makes metrics from get_config, but that of {self.kind} loses "
                    f"{name}, {value!r:.80}. Return it there, too."
                )
        self.name: str = (arguments or {}).get("name", getattr(metric, "name", metric))
        """Name of the metric: the argument "name", or as it was given, or as Keras names it."""
        self._states: dict[Any, KerasState] = {}

    def _made(self) -> keras.metrics.Metric:
        return self._class.from_config({**self._config, "dtype": "float64"})

    def __call__(self, labels: Any, outputs: Any, weight: Any = None) -> Inputs:
        """Returns a value for `ddl.PerExample.metrics`. Replica context.

        Args:
          labels: [batch, …], as the Keras metric takes them.
          outputs: [batch, …]; floats are cast to float64.
          weight: float [batch, …], of the first dimensions of labels and outputs; None takes the
            weight of the loss. The Trainer multiplies it by the weight of the data.

        Raises:
          ConfigError: If labels and outputs are not numbers with one row for each example.
        """
        labels, outputs = tf.convert_to_tensor(labels), tf.convert_to_tensor(outputs)
        for what, values in (("labels", labels), ("outputs", outputs)):
            if values.dtype == tf.string or not values.shape.rank:
                raise ConfigError(
                    f"The metric {self.name!r} needs {what} [batch, …] that are numbers, got "
                    f"{values.dtype.name} of shape {tuple(values.shape)}."
                )
        return Inputs(self, labels, outputs, weight)

    def state(
        self, name: str, labels: tf.TensorSpec, outputs: tf.TensorSpec, rank: int
    ) -> KerasState:
        """Returns the state for inputs of some shapes; see `ddl.metrics.values.Inputs`.

        Raises:
          ConfigError: If the state does not add up, or the metric does not take the inputs.
        """
        rows = [tf.TensorSpec(x.shape[rank:], x.dtype) for x in (labels, outputs)]
        key = tuple((tuple(x.shape), x.dtype) for x in rows)
        dimensions = 1 + rows[0].shape.rank
        faults: list[Any] = []
        # Keras's metrics differ in the shape of the weights that they take.
        for weights in sorted({1, max(dimensions - 1, 1), dimensions}):
            if key not in self._states:
                faults.append(alone(adding_up, name, self._made, *rows, weights))
                if isinstance(faults[-1], KerasState):
                    self._states[key] = faults[-1]
        if key not in self._states:
            raise ConfigError(
                f"The metric {name!r} ({self.kind}) does not add up over examples, batches and "
                f"replicas: {min(faults, key=lambda fault: fault.startswith(FAILS))}. Compute it "
                "from all outputs (ddl.metrics.CorpusMetric), or return one value for each example."
            )
        return self._states[key]


def _class_named(name: str) -> type[keras.metrics.Metric]:
    """Returns the class of a name such as "AUC" or "f1_score"."""
    known = {key: one for key, one in vars(keras.metrics).items() if isinstance(one, type)}
    by_letters = {key.lower(): one for key, one in known.items()}
    found = by_letters.get(name.replace("_", "").lower())
    if found is None:
        raise ConfigError(
            "KerasMetric.metric must be the name of a metric of Keras, such as 'AUC' or 'F1Score', "
            f"or a Keras metric, got {name!r}. Correct the name.{did_you_mean(name, list(known))}"
        )
    return found


FAILS = "it fails on random examples: "
"""Beginning of the clause for a metric that raises an error."""

_ROWS = 7


def adding_up(
    name: str,
    make: Callable[[], keras.metrics.Metric],
    labels: tf.TensorSpec,
    outputs: tf.TensorSpec,
    weight_rank: int,
) -> KerasState | str:
    """Returns the state of a metric, or why its sums over parts are not those of the data.

    The metric computes its state of a few random examples with random weights, as a whole and of
    each example alone, for several ranges of labels and outputs: a metric that takes a batch for
    one example, or whose formula depends on all labels of a batch, may add up by chance if these
    are 0 and 1. Eager; in `ddl.metrics.state.alone`.

    Args:
      name: Name of the metric, for errors.
      make: Makes the metric.
      labels: One row: shape without the batch, and dtype.
      outputs: The same for the outputs.
      weight_rank: Number of first dimensions of the labels for which the metric gets weights.

    Returns:
      The state, with the names of its figures; or a clause for an error.
    """
    metric: Any = make()
    is_binary = isinstance(metric, keras.metrics.BinaryIoU)
    if getattr(metric, "sparse_y_pred", False) and outputs.dtype.is_floating and not is_binary:
        # Keras would truncate a probability of 0.9 to class 0.
        return "it takes class numbers as outputs. Pass tf.argmax, or set sparse_y_pred=False"
    random = np.random.default_rng(0)
    try:
        starts = [np.any(v.numpy()) for v in metric.variables]
        # The first update makes the variables that depend on shapes.
        given = _rows(labels, random, 0, 1), _rows(outputs, random, 0.05, 0.95)
        ones = tf.ones([_ROWS, *labels.shape][:weight_rank], tf.float64)
        metric.update_state(*map(tf.constant, given), sample_weight=ones)
        metric.reset_state()
        if any(starts) or not metric.variables or any(np.any(v.numpy()) for v in metric.variables):
            return "it must keep its state in variables of add_variable that start at 0"
        state = KerasState(name, metric, weight_rank)
        return _fault(state, labels, outputs, random) or state
    except Exception as error:
        return f"{FAILS}{error}".strip().rstrip(".")


def _fault(
    state: KerasState, labels: tf.TensorSpec, outputs: tf.TensorSpec, random: np.random.Generator
) -> str | None:
    """Returns the clause for the error, or None; names the figures.

    A range that the metric does not take, or whose state is not finite, does not count; in one of
    the others the state must not be 0.
    """
    computed = tf.function(state.sums, autograph=False)
    last = outputs.shape[-1] - 1 if outputs.shape.rank and outputs.shape[-1] > 1 else 9
    chances = 0.05, 0.95
    ranges: list[Any] = [(0, 1, chances), (0, last, chances), (0, 1, (0, 1))]
    ranges += [] if state.takes_probabilities else [(0, 1, (-3.0, 3.0))]
    ranges += [] if labels.dtype.is_unsigned or labels.dtype.is_bool else [(-1, 1, chances)]
    changes = np.zeros(state.size, bool)
    error: Exception | None = None
    for low, high, of_outputs in ranges:
        given = _rows(labels, random, low, high), _rows(outputs, random, *of_outputs)
        weight = random.integers(1, 4, _ROWS).astype(np.float64)
        weight[0] = 0  # padding, also before the others
        try:
            whole = computed(*map(tf.constant, (*given, weight))).numpy()
            rows = [computed(*map(tf.constant, (*given, row))).numpy() for row in np.diag(weight)]
            onto = state.sums(*map(tf.constant, (*given, weight, whole))).numpy()
        except Exception as raised:
            error = raised
            continue
        if not np.isfinite(whole).all():
            continue
        changes |= whole != 0
        state.figures(whole)
        for found, how in (
            (np.sum(rows, axis=0), "as the sum of those of each example"),
            (onto - whole, "as what is added to an earlier state"),
        ):
            wrong = ~np.isclose(whole, found, rtol=1e-9, atol=1e-9) & state.matters
            if wrong.any():
                index = int(np.argmax(wrong))
                return (
                    f"its state after {_ROWS} examples has {whole[index]:.6g}, but "
                    f"{found[index]:.6g} {how}, for labels from {low} to {high}"
                )
    # The count of a mean does change.
    if not changes[: 1 if isinstance(state.metric, keras.metrics.Mean) else None].any():
        if error is not None:
            raise error
        shapes = f"labels {[_ROWS, *labels.shape]} and outputs {[_ROWS, *outputs.shape]}"
        return f"its state stays 0 for random {shapes}, which may be shapes that it does not take"
    return None


def _rows(spec: tf.TensorSpec, random: np.random.Generator, low: Any, high: Any) -> np.ndarray:
    """Returns random rows: floats in float64 between fractions, else whole numbers."""
    shape = (_ROWS, *spec.shape)
    if spec.dtype.is_floating and isinstance(low, float):
        return random.uniform(low, high, shape)
    dtype = np.float64 if spec.dtype.is_floating else spec.dtype.as_numpy_dtype
    return random.integers(int(low), max(round(high), 1) + 1, shape).astype(dtype)
