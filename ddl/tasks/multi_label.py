"""Classification in which an example may belong to several classes, or to none."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.metrics.keras_metric import KerasMetric
from ddl.tasks.checks import check_features, check_model, in_float32, one_output, output_shape
from ddl.tasks.inputs import check_inputs, check_looked_up, inputs_of
from ddl.tasks.task import PerExample


class MultiLabel:
    """A model from inputs to one logit for each class, each a yes or no of its own.

    The loss of an example is the mean over the classes of the binary cross-entropy.
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
        check_model(model, "MultiLabel")
        shape = output_shape(model)
        if shape is not None and len(shape) != 1:
            raise ConfigError(
                f"MultiLabel needs a model with logits [batch, classes], but {model.name!r} "
                f"returns {(None, *shape)}. End it in keras.layers.Dense(classes)."
            )
        weights = None if positive_weights is None else [float(w) for w in positive_weights]
        if weights is not None and (
            min(weights, default=-1.0) < 0 or (shape and len(weights) != shape[0])
        ):
            raise ConfigError(
                "MultiLabel.positive_weights must be a number of at least 0 for each class of the "
                f"model, got {weights} for logits of shape {shape}. Give one number for each class."
            )
        if not 0 < threshold < 1:
            raise ConfigError(f"MultiLabel.threshold must be between 0 and 1, got {threshold}.")
        self.model = model
        self._positive_weights = weights
        self._threshold = float(np.log(threshold / (1 - threshold)))
        self._input_name = input_name
        self._label_name = label_name
        self._auc = KerasMetric("AUC", {"name": "auc"})
        self._precision = KerasMetric(
            "AUC", {"name": "mean_average_precision", "curve": "PR", "multi_label": True}
        )
        self._f1 = {
            name: KerasMetric("F1Score", {"name": name, "average": average, "threshold": 0.5})
            for name, average in (("f1_micro", "micro"), ("f1_macro", "macro"))
        }

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch. Replica context.

        Args:
          features: Inputs [batch, …]; labels [batch, classes].
          training: Whether to run the model in training mode.

        Returns:
          The loss [batch], and the metrics "binary_accuracy", the share of classes that are right,
          "exact_match", 1 where all are, "f1_micro" and "f1_macro", the F1 score of all classes
          together and its mean over the classes, "auc", the area under the ROC curve of all classes
          together, and "mean_average_precision", the mean over the classes of the area under the
          curve of precision and recall (from 200 thresholds).
        """
        inputs = inputs_of(self.model, features, self._input_name, self._label_name)
        outputs, given = self.model(inputs, training=training), features[self._label_name]
        form, expected = "[batch, classes]", given.shape[1:]
        logits = one_output(outputs, self.model, "MultiLabel", form, expected)
        labels = self._checked(tf.cast(given, logits.dtype))
        if self._positive_weights is None:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        else:
            factors = tf.constant(self._positive_weights, logits.dtype)
            losses = tf.nn.weighted_cross_entropy_with_logits(labels, logits, factors)
        # A logit that is not a number is above no threshold, and predicts nothing.
        predicted = logits >= self._threshold
        right = tf.equal(predicted, labels >= 0.5) & ~tf.math.is_nan(logits)
        chances = tf.sigmoid(tf.cast(logits, tf.float64))
        predictions = tf.cast(predicted, tf.float64)
        return PerExample(
            tf.reduce_mean(losses, axis=-1),
            {
                # In float32, a share such as 2/3 would be exact to eight digits alone.
                "binary_accuracy": tf.reduce_mean(tf.cast(right, tf.float64), axis=-1),
                "exact_match": tf.cast(tf.reduce_all(right, axis=-1), tf.float32),
                **{name: f1(labels, predictions) for name, f1 in self._f1.items()},
                "auc": self._auc(labels, chances),
                "mean_average_precision": self._precision(labels, chances),
            },
        )

    def _checked(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns labels after a check of the values, which not every source has as an array."""
        nan = tf.constant(float("nan"), labels.dtype)
        is_either = tf.equal(labels, 0.0) | tf.equal(labels, 1.0)
        message = f"Feature {self._label_name!r} has a value other than 0 and 1 (MultiLabel)"
        return tf.debugging.check_numerics(tf.where(is_either, labels, nan), message)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the probability of each class, [batch, classes]."""
        inputs = inputs_of(self.model, features, self._input_name, self._label_name)
        return tf.sigmoid(in_float32(self.model(inputs, training=False)))

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a feature is missing, the inputs do not fit the model, or the labels are not
            0 or 1 for each class. Label values are checked where the source has them as arrays.
        """
        spec = source.element_spec
        check_features(spec, {"label_name": self._label_name}, "MultiLabel")
        check_inputs(self.model, spec, self._input_name, self._label_name, "MultiLabel")
        check_looked_up(self.model, source, self._input_name)
        label, shape = spec[self._label_name], output_shape(self.model)
        classes = None if shape is None else shape[0]
        if (
            label.dtype == tf.string
            or label.shape.rank != 1
            or classes not in (None, label.shape[0])
        ):
            raise DataError(
                "MultiLabel needs labels with 0 or 1 for each class, shape "
                f"({classes or 'classes'},), got {label.dtype.name} of shape "
                f"{tuple(label.shape)}. Change the labels or the model's number of outputs; "
                "for one class an example, use ddl.Classification."
            )
        arrays = getattr(source, "arrays", None) or {}
        values = arrays.get(self._label_name) if isinstance(arrays, dict) else None
        if values is not None and not np.isin(values, (0, 1)).all():
            row = int(np.argmax(~np.isin(values, (0, 1)).all(axis=1)))
            raise DataError(
                f"Labels of MultiLabel must be 0 or 1, got {values[row].tolist()} in example "
                f"{row}. Round probabilities, or use ddl.Supervised with a Keras loss for them."
            )
