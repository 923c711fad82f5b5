"""Metrics of Keras whose state adds up, exact over any devices."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.metrics.adding_up import FAILS, adding_up
from ddl.metrics.in_float64 import alone, maker_of
from ddl.metrics.state import KerasState
from ddl.metrics.values import Inputs

_REMEDY = (
    "Compute it from all outputs at once (ddl.metrics.OfAllOutputs), or return one value for each "
    "example, whose mean is reported."
)


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
        self,
        metric: str | keras.metrics.Metric,
        arguments: Mapping[str, Any] | None = None,
    ):
        """Finds the class of the metric, and makes one to check the arguments.

        Args:
          metric: Name of a Keras metric, such as "AUC"; or a Keras metric, of which class and
            config are taken.
          arguments: Arguments of the class, with a name.

        Raises:
          ConfigError: If there is no such metric, or it does not take the arguments.
        """
        if not isinstance(metric, str | keras.metrics.Metric):
            raise ConfigError(
                "KerasMetric.metric must be the name of a Keras metric or a Keras metric, got "
                f"{metric!r:.80}. Name it, as in KerasMetric('AUC'), or pass a metric itself."
            )
        if arguments and not isinstance(metric, str):
            raise ConfigError(
                "KerasMetric.arguments belong to the name of a metric, got the metric "
                f"{metric.name!r}. Pass the arguments to its class."
            )
        self._make = maker_of(metric, dict(arguments or {}))
        try:
            made = alone(self._make)
        except Exception as error:
            given = metric if isinstance(metric, str) else type(metric).__name__
            raise ConfigError(
                f"KerasMetric cannot make the metric {given} in float64: {error} Correct its "
                "arguments, or its get_config."
            ) from None
        given = (arguments or {}).get("name", metric)
        self.name: str = given if isinstance(given, str) else given.name
        """Name of the metric: the argument "name", or as it was given, or as Keras names it."""
        self.kind = type(made).__name__
        """Name of the metric's class."""
        self._states: dict[Any, KerasState] = {}

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
                    f"The metric {self.name!r} needs {what} of shape [batch, …] that are numbers, "
                    f"got {values.dtype.name} of shape {tuple(values.shape)}. Pass a number for "
                    "each example."
                )
        weight = None if weight is None else tf.convert_to_tensor(weight)
        return Inputs(self, labels, outputs, weight)

    def state(
        self, name: str, labels: tf.TensorSpec, outputs: tf.TensorSpec, rank: int
    ) -> KerasState:
        """Returns the state for inputs of some shapes; see `ddl.metrics.values.Metric`.

        Raises:
          ConfigError: If the state does not add up, or the metric does not take the inputs.
        """
        rows = [tf.TensorSpec(x.shape[rank:], x.dtype) for x in (labels, outputs)]
        key = tuple((tuple(x.shape), x.dtype) for x in rows)
        if key not in self._states:
            self._states[key] = self._checked(name, *rows)
        return self._states[key]

    def _checked(self, name: str, labels: tf.TensorSpec, outputs: tf.TensorSpec) -> KerasState:
        dimensions = 1 + labels.shape.rank
        faults: list[str] = []
        # Keras's metrics differ in the shape of the weights that they take.
        for rank in sorted({1, max(dimensions - 1, 1), dimensions}):
            check = functools.partial(adding_up, name, self._make, labels, outputs, rank)
            found = alone(check)
            if isinstance(found, KerasState):
                return found
            faults.append(found)
        raise ConfigError(
            f"The metric {name!r} ({self.kind}) does not add up over examples, batches and "
            f"replicas: {min(faults, key=lambda fault: fault.startswith(FAILS))}. {_REMEDY}"
        )


def check_names(parameter: str, names: Sequence[str]) -> None:
    """Raises ConfigError if two metrics of a task's parameter have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{parameter} has two metrics with the name {name!r}. Give one another name: "
                "ddl.metrics.KerasMetric('Precision', {'name': 'precise'})."
            )
