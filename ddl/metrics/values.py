"""Values of metrics that a task returns beside plain tensors, in `ddl.PerExample.metrics`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf


class StateSums(Protocol):
    """Sums from which the figures of a metric follow: a vector that adds up over examples.

    Attributes:
      size: Length of the vector.
      names: Text that each figure adds to the name of the metric, such as "" or "/0".
    """

    size: int
    names: tuple[str, ...]

    def sums(self, labels: tf.Tensor, outputs: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Returns the sums of a microbatch, float64 [size]. Replica context, in a graph.

        Args:
          labels: [batch, …].
          outputs: [batch, …].
          weight: float64, of the first dimensions of labels and outputs; 0 for padding.
        """
        ...

    def figures(self, sums: np.ndarray) -> tuple[float, ...]:
        """Returns the figures in the order of `names`, from sums float64 [size]. Eager."""
        ...


class Inputs(NamedTuple):
    """Inputs from which a metric computes its state.

    Attributes:
      metric: Its `state(name, labels, outputs, rank)` returns the `StateSums` for inputs of some
        specs and weights of a rank, after a check that they add up. Eager.
      labels: [batch, …].
      outputs: [batch, …].
      weight: float [batch, …], of the first dimensions of labels and outputs; None takes the
        weight of the loss.
    """

    metric: Any
    labels: tf.Tensor
    outputs: tf.Tensor
    weight: tf.Tensor | None


class OfMean(NamedTuple):
    """Values whose weighted mean passes through a function before it is reported.

    Attributes:
      values: float, of the shape of the loss.
      function: From the mean to the figure.
    """

    values: tf.Tensor
    function: Callable[[float], float]


Value = tf.Tensor | Inputs | OfMean


def tensors_by_name(metrics: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns all tensors of a task's metrics, by names that errors can use."""
    found: dict[str, tf.Tensor] = {}
    for name, value in metrics.items():
        if isinstance(value, Inputs):
            found |= {f"{name} (labels)": value.labels, f"{name} (outputs)": value.outputs}
            if value.weight is not None:
                found[f"{name} (weight)"] = value.weight
        else:
            found[name] = value.values if isinstance(value, OfMean) else value
    return found
