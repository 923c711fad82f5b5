"""Functions of the examples whose mean or sum over the global batch a step computes."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.tasks.task import PerExample

OfExamples: TypeAlias = Callable[[dict[str, Any], bool], tf.Tensor]
"""Takes features and `training`, and returns a float tensor [batch, …]."""


class Summed(NamedTuple):
    """The sum of a function of the examples over the global batch.

    Attributes:
      total: The sum of the values times their weights, float64 […].
      weight: The sum of the weights, float64 [].
      dtype: Dtype of the function's values.
    """

    total: tf.Tensor
    weight: tf.Tensor
    dtype: tf.DType

    def mean(self) -> tf.Tensor:
        """Returns the mean in the dtype of the values; 0 without weight."""
        return tf.cast(tf.math.divide_no_nan(self.total, self.weight), self.dtype)

    def sum(self) -> tf.Tensor:
        """Returns the sum in the dtype of the values, or float32 if that has half precision."""
        half = self.dtype in (tf.float16, tf.bfloat16)
        return tf.cast(self.total, tf.float32 if half else self.dtype)


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
