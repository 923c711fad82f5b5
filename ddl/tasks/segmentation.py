"""Segmentation: a class for each pixel."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.metrics.keras_metric import KerasMetric
from ddl.tasks.accuracy import accuracy
from ddl.tasks.checks import (
    check_features,
    check_input,
    check_model,
    check_range,
    fits,
    one_output,
    output_shape,
)
from ddl.tasks.cross_entropy import cross_entropy
from ddl.tasks.task import PerExample


class Segmentation:
    """A model from images to logits of each pixel, such as that of examples/u_net.py.

    The loss is the cross-entropy: the mean over all pixels of the global batch. Pixels of the class
    `ignored` weigh 0.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        ignored: int | None = None,
        class_weights: Sequence[float] | None = None,
        input_name: str = "image",
        label_name: str = "label",
    ):
        """Initializes the task.

        Args:
          model: Maps images [batch, height, width, channels] to logits [batch, height, width,
            classes].
          ignored: Label of pixels to leave out, such as 255 for unlabelled borders; None leaves
            out none.
          class_weights: Weight of the pixels of each class; None weighs all 1.
          input_name: Name of the feature of images.
          label_name: Name of the feature of labels, integer [height, width].

        Raises:
          ConfigError: If the model is none or its output has another rank, or the weights are not
            one number of at least 0 for each class.
        """
        check_model(model, "Segmentation")
        shape = output_shape(model)
        if shape is None or len(shape) != 3:
            found = "has not been built" if shape is None else f"returns {(None, *shape)}"
            raise ConfigError(
                "Segmentation needs a model with logits [batch, height, width, classes], but "
                f"{model.name!r} {found}. Return logits of all pixels, as examples/u_net.py does."
            )
        weights = None if class_weights is None else [float(weight) for weight in class_weights]
        if weights is not None and (min(weights, default=-1.0) < 0 or len(weights) != shape[-1]):
            raise ConfigError(
                "Segmentation.class_weights must be a number of at least 0 for each class of the "
                f"model, got {weights} for logits of shape {shape}."
            )
        self.model = model
        self._mean_iou = KerasMetric("MeanIoU", {"num_classes": shape[-1], "name": "mean_iou"})
        self._ignored = ignored
        self._class_weights = weights
        self._input_name = input_name
        self._label_name = label_name

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes loss and accuracy of each pixel. Replica context.

        Args:
          features: Images [batch, height, width, channels]; labels, integer [batch, height, width].
          training: Whether to run the model in training mode.

        Returns:
          The loss, the metrics "accuracy" and "mean_iou", the mean over the classes of the
          intersection over union, and the weight. Class weights do not change "mean_iou".
        """
        labels = tf.cast(features[self._label_name], tf.int64)
        outputs = self.model(features[self._input_name], training=training)
        form, expected = "[batch, height, width, classes]", (*labels.shape[1:], None)
        logits = one_output(outputs, self.model, "Segmentation", form, expected)
        weight, counted = None, tf.ones(tf.shape(labels), logits.dtype)
        if self._ignored is not None:
            counts = labels != self._ignored
            weight = counted = tf.cast(counts, logits.dtype)
            labels = tf.where(counts, labels, tf.zeros([], tf.int64))
        if self._class_weights is not None:
            of_class = tf.gather(tf.constant(self._class_weights, logits.dtype), labels)
            weight = of_class if weight is None else weight * of_class
        shape = tf.shape(labels)
        rows, classes = tf.reshape(logits, [-1, logits.shape[-1]]), tf.reshape(labels, [-1])
        loss = cross_entropy(classes, rows)
        return PerExample(
            tf.reshape(loss, shape),
            {
                "accuracy": tf.reshape(accuracy(classes, rows, loss), shape),
                "mean_iou": self._mean_iou(labels, tf.argmax(logits, axis=-1), counted),
            },
            weight,
        )

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the class of each pixel, int64 [batch, height, width]."""
        return tf.argmax(self.model(features[self._input_name], training=False), axis=-1)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a feature is missing, the images do not fit the model, or the labels are no
            integers of the images' height and width. Label values are checked where the source has
            them as arrays.
        """
        spec = source.element_spec
        names = {"input_name": self._input_name, "label_name": self._label_name}
        check_features(spec, names, "Segmentation")
        check_input(self.model, self._input_name, spec[self._input_name])
        label = spec[self._label_name]
        shape = output_shape(self.model)
        size = None if shape is None else shape[:2]
        if not label.dtype.is_integer or (size and not fits(size, tuple(label.shape))):
            remedy = "Resize the masks with the images, and store them as integers."
            if size and fits((*size, None), tuple(label.shape)):
                remedy = "Convert one-hot masks by np.argmax(masks, axis=-1)."
            raise DataError(
                "Segmentation needs labels that are an integer for each pixel, shape "
                f"{size or '(height, width)'}, got {label.dtype.name} of shape "
                f"{tuple(label.shape)}. {remedy}"
            )
        if self._ignored is None and shape is not None:
            remedy = "Set the model's num_classes, or Segmentation.ignored for unlabelled pixels."
            check_range(source, self._label_name, shape[-1], "Labels of pixels", remedy)
