"""Classification in which an example may belong to several classes, or to none."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.metrics.keras_metric import KerasMetric
from ddl.tasks.checks import arrays_of, check_label, in_float32, output_shape
from ddl.tasks.supervised import Compared, Head, Supervised


class MultiLabel(Supervised):
    """A model from inputs to one logit for each class, each a yes or no of its own.

    The loss of an example is the mean over the classes of the binary cross-entropy. Reports
    "binary_accuracy", the share of classes that are right, "exact_match", 1 where all are,
    "f1_micro" and "f1_macro", the F1 score of all classes together and its mean over the classes,
    "auc", the area under the ROC curve of all classes together, and "mean_average_precision", the
    mean over the classes of the area under the curve of precision and recall (from 200
    thresholds).
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        positive_weights: Sequence[float] | None = None,
        threshold: float = 0.5,
        input_name: str = "image",
        label_name: str = "label",
    ):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to logits [batch, classes]; a model with several inputs gets
            a dict of the features.
          positive_weights: Factor of the loss where a class is present, for each class; None is 1.
          threshold: Probability from which a class counts as predicted, for the metrics.
          input_name: Name of the input feature of a model with one input.
          label_name: Name of the feature of labels, 0 or 1 for each class.

        Raises:
          ConfigError: If the model is none or its output has another rank, or an argument is out of
            range.
        """
        super().__init__(model, self._losses, input_name=input_name, label_name=label_name)
        shape = output_shape(model)
        weights = [1.0] if positive_weights is None else [float(w) for w in positive_weights]
        if shape is not None and (len(shape) != 1 or len(weights) not in (1, shape[0])):
            raise ConfigError(
                f"MultiLabel needs a model with logits [batch, classes], and one of "
                f"positive_weights for each class, but {model.name!r} returns {(None, *shape)} and "
                f"the weights are {positive_weights}. End it in keras.layers.Dense(classes)."
            )
        if not 0 < threshold < 1 or min(weights) < 0:
            raise ConfigError(
                "MultiLabel.threshold must be between 0 and 1 and positive_weights at least 0, got "
                f"{threshold} and {positive_weights}."
            )
        self._positive_weights = weights
        self._threshold = float(np.log(threshold / (1 - threshold)))
        options = {"curve": "PR", "multi_label": True}
        self._of_chances = {
            "auc": KerasMetric("AUC"),
            "mean_average_precision": KerasMetric("AUC", options),
        }
        self._f1 = {
            f"f1_{average}": KerasMetric("F1Score", {"average": average, "threshold": 0.5})
            for average in ("micro", "macro")
        }

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        # The values, which not every source has as an array.
        nan = tf.constant(float("nan"), logits.dtype)
        is_either = tf.equal(labels, 0.0) | tf.equal(labels, 1.0)
        message = "Labels of MultiLabel have a value other than 0 and 1"
        labels = tf.debugging.check_numerics(tf.where(is_either, labels, nan), message)
        factors = tf.constant(self._positive_weights, logits.dtype)
        return tf.nn.weighted_cross_entropy_with_logits(labels, logits, factors)

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        if not outputs.shape.is_compatible_with(labels.shape) or labels.shape.rank != 2:
            raise ConfigError(
                f"MultiLabel needs logits of the shape of the labels, {tuple(labels.shape)}, but "
                f"{self.model.name!r} returns {tuple(outputs.shape)}. Change its last layers."
            )
        labels = tf.cast(labels, outputs.dtype)
        # A logit that is not a number is above no threshold, and predicts nothing.
        predicted = outputs >= self._threshold
        right = tf.equal(predicted, labels >= 0.5) & ~tf.math.is_nan(outputs)
        chances = tf.sigmoid(tf.cast(outputs, tf.float64))
        predictions = tf.cast(predicted, tf.float64)
        metrics: dict[str, Any] = {
            "binary_accuracy": right,
            "exact_match": tf.reduce_all(right, axis=-1),
            **{name: f1(labels, predictions) for name, f1 in self._f1.items()},
            **{name: metric(labels, chances) for name, metric in self._of_chances.items()},
        }
        return Compared(tf.reduce_mean(head.loss(labels, outputs), axis=-1), metrics)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the probability of each class, [batch, classes]."""
        return tf.sigmoid(in_float32(super().predict(features)))

    def _check_label(self, source: Any, head: Head) -> None:
        form, remedy = "0 or 1 for each class", "For one class an example, use ddl.Classification."
        shape = output_shape(self.model) or (None,)
        check_label(self, source.element_spec[head.label], head.label, form, shape, remedy)
        values = arrays_of(source).get(head.label)
        if values is not None and not np.isin(values, (0, 1)).all():
            row = int(np.argmax(~np.isin(values, (0, 1)).all(axis=1)))
            raise DataError(
                f"Labels of MultiLabel must be 0 or 1, got {values[row].tolist()} in example "
                f"{row}. Round probabilities, or use ddl.Supervised with a Keras loss for them."
            )
