"""Regression: numbers to predict."""

import math
from collections.abc import Callable
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError, check_choice
from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.of_mean import FunctionOfMean
from ddl.tasks.checks import (
    check_features,
    check_model,
    fits,
    in_float32,
    output_shape,
    without_one,
)
from ddl.tasks.inputs import check_inputs, check_looked_up, inputs_of
from ddl.tasks.task import PerExample

_LOSSES: dict[str, Callable[[tf.Tensor, float], tf.Tensor]] = {
    "squared": lambda error, _: tf.square(error),
    "absolute": lambda error, _: tf.abs(error),
    "huber": lambda error, delta: tf.where(
        tf.abs(error) <= delta, 0.5 * tf.square(error), delta * (tf.abs(error) - 0.5 * delta)
    ),
}


class Regression:
    """A model from inputs to numbers.

    Labels are [batch] or [batch, …], in the shape of the outputs; a last dimension of 1 may be left
    out of either. The loss of an example is the mean over its numbers.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        loss: Literal["squared", "absolute", "huber"] = "squared",
        huber_delta: float = 1.0,
        input_name: str = "image",
        label_name: str = "label",
    ):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to outputs [batch, …]; a model with several inputs gets a
            dict of the features.
          loss: "squared", "absolute", or "huber": squared up to an error of `huber_delta`, linear
            beyond (Huber 1964, "Robust Estimation of a Location Parameter").
          huber_delta: See `loss`.
          input_name: Name of the input feature of a model with one input.
          label_name: Name of the feature of labels.

        Raises:
          ConfigError: If the model is none, `loss` is unknown, or `huber_delta` is not positive.
        """
        check_model(model, "Regression")
        check_choice("Regression.loss", loss, tuple(_LOSSES))
        if not huber_delta > 0:
            raise ConfigError(f"Regression.huber_delta must be above 0, got {huber_delta}.")
        self.model = model
        self._loss = loss
        self._huber_delta = float(huber_delta)
        self._input_name = input_name
        self._label_name = label_name
        self._root = FunctionOfMean(math.sqrt)
        self._r2 = KerasMetric("R2Score", {"name": "r2"})

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch. Replica context.

        Args:
          features: Inputs [batch, …]; labels [batch, …].
          training: Whether to run the model in training mode.

        Returns:
          The loss [batch], and the metrics "mean_absolute_error", "mean_squared_error", its root
          "root_mean_squared_error", and "r2", the coefficient of determination over all examples,
          a mean over the numbers of an example.
        """
        inputs = inputs_of(self.model, features, self._input_name, self._label_name)
        outputs = self.model(inputs, training=training)
        if not tf.is_tensor(outputs):
            raise ConfigError(
                f"Regression needs a model with one output, but {self.model.name!r} returns a "
                f"{type(outputs).__name__}. Return one tensor, or write a task of your own."
            )
        outputs = in_float32(outputs)
        labels = tf.cast(features[self._label_name], outputs.dtype)
        sizes = [math.prod(each.shape[1:]) for each in (outputs, labels)]
        if sizes[0] != sizes[1]:
            raise DataError(
                "Regression needs labels in the shape of the model's outputs, "
                f"{outputs.shape[1:]}, got {labels.shape[1:]}. Change the last layer of "
                f"{self.model.name!r}, or reshape the labels."
            )
        # Else [batch] would broadcast against [batch, 1], each label against all outputs.
        rows = tf.shape(outputs)[0]
        outputs, labels = (tf.reshape(each, [rows, sizes[0]]) for each in (outputs, labels))
        error = outputs - labels

        def mean(values: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(values, axis=-1)

        squared = mean(tf.square(error))
        return PerExample(
            mean(_LOSSES[self._loss](error, self._huber_delta)),
            {
                "mean_absolute_error": mean(tf.abs(error)),
                "mean_squared_error": squared,
                "root_mean_squared_error": self._root(squared),
                "r2": self._r2(labels, outputs),
            },
        )

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the model's outputs [batch, …]."""
        inputs = inputs_of(self.model, features, self._input_name, self._label_name)
        return self.model(inputs, training=False)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a feature is missing, the inputs do not fit the model, or the labels have
            another shape than the outputs.
        """
        spec = source.element_spec
        check_features(spec, {"label_name": self._label_name}, "Regression")
        check_inputs(self.model, spec, self._input_name, self._label_name, "Regression")
        check_looked_up(self.model, source, self._input_name)
        label, shape = spec[self._label_name], output_shape(self.model)
        if label.dtype == tf.string:
            raise DataError(
                f"Feature {self._label_name!r} must be numbers, got text. Convert it in the data."
            )
        if shape is not None and not fits(without_one(shape), without_one(tuple(label.shape))):
            raise DataError(
                f"Regression needs labels in the shape of the model's outputs, {shape}, got "
                f"{tuple(label.shape)}. Change the last layer of {self.model.name!r}, or reshape "
                "the labels."
            )
