"""Functions of the examples whose mean or sum over the global batch a step computes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.tasks.task import PerExample

OfExamples: TypeAlias = Callable[[dict[str, Any], bool], tf.Tensor]
"""Takes features and `training`, and returns a float tensor [batch, …]."""


class Values:
    """A function of the examples in the form of a loss, with one value for each entry.

    Attributes:
      shape: Shape of the result for one example; None before the first call.
      dtype: Dtype of the result; None before the first call.
    """

    def __init__(self, function: OfExamples, where: str):
        """Keeps the function.

        Args:
          function: The function.
          where: Description of the caller, for errors.
        """
        self._function = function
        self._where = where
        self.__name__ = getattr(function, "__name__", "")
        self.shape: tf.TensorShape | None = None
        self.dtype: tf.DType | None = None

    def __call__(self, features: dict[str, Any], training: bool) -> PerExample:
        """Returns the values as losses, [batch, entries].

        Raises:
          ConfigError: If they are no float tensor with a value for each example.
        """
        values = self._function(features, training)
        is_tensor = tf.is_tensor(values) or hasattr(values, "dtype")
        if not is_tensor or not tf.as_dtype(values.dtype).is_floating or not values.shape.rank:
            raise ConfigError(
                f"{self._where}: the function {self.__name__!r} must return a float tensor with "
                f"the batch as its first dimension, got {values!r:.80}."
            )
        self.shape, self.dtype = values.shape[1:], tf.as_dtype(values.dtype)
        return PerExample(tf.reshape(values, [values.shape[0], -1]))

    def __repr__(self) -> str:  # errors show the user's function
        return repr(self._function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and other._function == self._function

    def __hash__(self) -> int:
        return hash(self._function)


def mean_of(values: Values, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a function's values, in their dtype; 0 without weight.

    Args:
      values: The function, called before.
      total: The sum of the values times their weights, float64 [entries].
      weight: The sum of the weights, float64 [].
    """
    mean = tf.math.divide_no_nan(total, weight)
    return tf.reshape(tf.cast(mean, values.dtype), values.shape)


def sum_of(values: Values, total: tf.Tensor) -> tf.Tensor:
    """Returns the sum in the dtype of the values, or float32 if that has half precision."""
    half = values.dtype in (tf.float16, tf.bfloat16)
    return tf.reshape(tf.cast(total, tf.float32 if half else values.dtype), values.shape)
