"""Figures that are a function of a mean, such as the perplexity."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import check_takes
from ddl.metrics.values import OfMean


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
        super().__init__(_exp)


def _exp(mean: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(mean))
