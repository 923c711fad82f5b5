"""Metrics as sums, which add up exactly over replicas, microbatches and steps.

The sums are float64: counts are exact up to 2^53, and rounding stays negligible in a long run.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.metrics.values import StateSums


class MetricSums:
    """The layout of a vector: Σ weight, Σ weight·value of each mean, sums of the other metrics.

    A single vector needs one reduce per step and one fetch per loop.

    Attributes:
      names: Names of the figures, in the order of `means`.
      metrics: Names of the loss and of the metrics, as the task returns them.
    """

    def __init__(
        self,
        names: Sequence[str],
        functions: Mapping[str, Callable[[float], float]] | None = None,
        states: Mapping[str, StateSums] | None = None,
    ):
        """Fixes the order; entry 0 of the vector is the sum of weights.

        Args:
          names: Names of the means.
          functions: Functions of some of the means, which are reported instead of these.
          states: Sums of the metrics that are no means, by their names.
        """
        self._means = tuple(names)
        self._functions = dict(functions or {})
        self.states = dict(states or {})
        figures = [f"{name}{path}" for name, one in self.states.items() for path in one.names]
        self.names = (*self._means, *figures)
        self.metrics = (*self._means, *self.states)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return 1 + len(self._means) + sum(one.size for one in self.states.values())

    def zeros(self) -> tf.Tensor:
        """Returns the empty sums: float64 [size]."""
        return tf.zeros([self.size], tf.float64)

    def sums(
        self,
        values: Mapping[str, tf.Tensor],
        weight: tf.Tensor | None,
        of_states: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Computes the sums of one replica's microbatch. Replica context.

        Args:
          values: One float tensor per mean, each of the shape of `weight`.
          weight: float [batch, …]; None if all weights are one.
          of_states: Sums of the other metrics, in the order of `states`.

        Returns:
          float64 [size].
        """
        of_names = [values[name] for name in self._means]
        if len({value.dtype for value in of_names}) > 1:
            of_names = [tf.cast(value, tf.float64) for value in of_names]
        rows = [tf.ones_like(of_names[0]), *of_names]
        products = tf.cast(tf.stack(rows), tf.float64)
        if weight is not None:
            # Rows of weight zero are padding: their values, even infinities, must not count.
            products = tf.math.multiply_no_nan(products, tf.cast(weight, tf.float64))
        sums = tf.reduce_sum(tf.reshape(products, [1 + len(self._means), -1]), axis=1)
        return tf.concat([sums, *of_states], axis=0) if of_states else sums

    def means(self, sums: tf.Tensor | np.ndarray) -> dict[str, float]:
        """Returns the figures by name, as Python floats; all NaN if the weights sum to 0.

        Args:
          sums: float64 [size].

        Raises:
          ConfigError: If the outputs do not fit a metric.
        """
        vector = np.asarray(sums)
        ends = np.cumsum([1 + len(self._means), *(one.size for one in self.states.values())])
        of_means, *of_states = np.split(vector, ends[:-1])
        with np.errstate(invalid="ignore", divide="ignore"):
            figures = {
                name: float(np.divide(total, vector[0]))
                for name, total in zip(self._means, of_means[1:], strict=True)
            }
        figures |= {name: _value(f, figures[name]) for name, f in self._functions.items()}
        for (name, state), own in zip(self.states.items(), of_states, strict=True):
            # After a divergence the sums are NaN, which the loss reports.
            is_defined = vector[0] != 0 and np.isfinite([vector[1], *own]).all()
            found = state.figures(own) if is_defined else [math.nan] * len(state.names)
            figures |= {f"{name}{p}": x for p, x in zip(state.names, found, strict=True)}
        return figures


def _value(function: Callable[[float], float], mean: float) -> float:
    """Returns a function's value; NaN if it has none, such as for a NaN; inf if it overflows."""
    if math.isnan(mean):
        return math.nan
    try:
        return float(function(mean))
    except OverflowError:
        return math.inf
    except (ArithmeticError, ValueError):
        return math.nan


class SumsOfLosses:
    """The metric sums of all losses of an update, one after the other in one vector.

    Each loss has its own sum of weights, so each has its own denominator.

    Attributes:
      names: Names of the figures. A single loss has those of its `MetricSums`; with several, the
        name "loss" becomes "loss/NAME" with the name of the loss.
    """

    def __init__(self, of_losses: Mapping[str, MetricSums]):
        """Fixes the order of the losses.

        Args:
          of_losses: The layout of each loss, by its name.

        Raises:
          ConfigError: If two losses return a metric of the same name.
        """
        self._of_losses = dict(of_losses)
        named = [self._figures(loss, sums) for loss, sums in self._of_losses.items()]
        self.names = tuple(name for names in named for name in names)
        for name in self.names:
            if self.names.count(name) > 1:
                raise ConfigError(
                    f"Two losses of a step return the metric {name!r}. Name each metric once, such "
                    f"as {next(iter(of_losses))}_{name}."
                )

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(sums.size for sums in self._of_losses.values())

    def zeros(self) -> tf.Tensor:
        """Returns the empty sums: float64 [size]."""
        return tf.zeros([self.size], tf.float64)

    def joined(self, sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the vector for the sums of each loss, by name; zeros for the missing ones."""
        of_losses = [
            sums[name] if name in sums else layout.zeros()
            for name, layout in self._of_losses.items()
        ]
        return of_losses[0] if len(of_losses) == 1 else tf.concat(of_losses, axis=0)

    def weight(self, sums: tf.Tensor | np.ndarray) -> float:
        """Returns the sum of the weights of all losses.

        Args:
          sums: float64 [size].
        """
        return float(sum(part[0] for part in self._parts(sums)))

    def means(self, sums: tf.Tensor | np.ndarray) -> dict[str, float]:
        """Returns the weighted means by the names of the figures, as Python floats.

        A loss without weight, such as one that no update has used (`Update.when`), is left out if
        another has some; else all means are NaN.

        Args:
          sums: float64 [size].
        """
        means: dict[str, float] = {}
        weight = self.weight(sums)
        for (loss, layout), part in zip(self._of_losses.items(), self._parts(sums), strict=True):
            if weight and not part[0]:
                continue
            of_loss = layout.means(part).values()
            means |= dict(zip(self._figures(loss, layout), of_loss, strict=True))
        return means

    def _parts(self, sums: tf.Tensor | np.ndarray) -> list[np.ndarray]:
        """Splits the vector into those of the losses."""
        ends = np.cumsum([layout.size for layout in self._of_losses.values()])[:-1]
        return np.split(np.asarray(sums), ends)

    def _figures(self, loss: str, layout: MetricSums) -> list[str]:
        if len(self._of_losses) == 1:
            return list(layout.names)
        return [f"loss/{loss}" if name == "loss" else name for name in layout.names]
