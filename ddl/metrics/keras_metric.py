"""Metrics of Keras whose state adds up, exact over any devices."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, did_you_mean
from ddl.metrics.adding_up import FAILS, adding_up
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
            alone(self._made)
        except Exception as error:
            raise ConfigError(
                f"KerasMetric cannot make the metric {self.kind} in float64: {error} Correct its "
                "arguments, or its get_config."
            ) from None
        given = metric if isinstance(metric, str) else metric.name
        self.name: str = (arguments or {}).get("name", given)
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
                "from all outputs (ddl.metrics.OfAllOutputs), or return one value for each example."
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
