"""Classification: of examples and pixels by one class each, and by several classes."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.layers.images import Mixed
from ddl.metrics.keras_metric import KerasMetric
from ddl.tasks import checks
from ddl.tasks.supervised import Compared, Head, Supervised
from ddl.tasks.task import PerExample


class Classification(Supervised):
    """Single-label classification: a model from inputs to one logit per class.

    The task reads the input and the feature "label" (see `input_name`, `label_name`). A model with
    several inputs, such as `ddl.models.table_mlp`, gets a dict of the features that it names.
    Labels are integers [batch] or one-hot rows [batch, classes]. Reports "accuracy", with `top_k`
    "top_<k>_accuracy", and those of `metrics`.
    """

    _remedy = (
        "Number the classes from 0 as integers, and set the model's num_classes. For other targets "
        "use ddl.Regression, for pixels ddl.Segmentation, for tokens ddl.LanguageModel."
    )

    def __init__(
        self,
        model: keras.Model,
        *,
        loss: keras.losses.Loss | None = None,
        label_smoothing: float = 0.0,
        top_k: int | None = None,
        metrics: Sequence[str | KerasMetric] = (),
        augmentations: Sequence[Callable[..., tf.Tensor]] = (),
        mixing: Callable[[tf.Tensor, tf.Tensor], Mixed] | None = None,
        **names: Any,
    ):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to logits [batch, classes].
          loss: A Keras loss of (labels, logits) with reduction=None that takes integer or one-hot
            labels as the data have them. None is the cross-entropy from logits, for either.
          label_smoothing: Fraction of each label spread evenly over all classes, in [0, 1)
            (Szegedy et al. 2016, "Rethinking the Inception Architecture"); for loss=None only.
          top_k: If given, also report the top-k accuracy; at least 1.
          metrics: Further metrics: names of Keras metrics such as "AUC" or "F1Score", or
            `ddl.metrics.KerasMetric`. They get one-hot labels and the probabilities of the classes,
            [batch, classes] each.
          augmentations: Callables such as layers of `ddl.layers`, applied to the inputs in order,
            in training only. They are not exported.
          mixing: `ddl.layers.Mixup` or `ddl.layers.CutMix`, applied after the augmentations, in
            training only. Loss and accuracies of training are then means of those for both
            labels, and it reports none of `metrics`.
          names: `input_name`, `label_name` and `class_weight`, as of `Supervised`.

        Raises:
          ConfigError: If `loss` has a reduction, another argument is out of range, or both mixing
            and class weights are given: a mixed example has two classes.
        """
        super().__init__(model, loss or self._cross_entropy, metrics=metrics, **names)
        if not 0 <= label_smoothing < 1 or (label_smoothing and loss is not None):
            raise ConfigError(
                f"{self._name}.label_smoothing must be at least 0 and below 1, and only without a "
                f"loss, got {label_smoothing}. A Keras loss takes it in its constructor."
            )
        if top_k is not None and top_k < 1:
            raise ConfigError(f"{self._name}.top_k must be at least 1, or None, got {top_k}.")
        if mixing is not None and self._class_weight:
            raise ConfigError(f"{self._name} takes mixing or class_weight, not both. Drop one.")
        self._ignored: int | None = None
        self._label_smoothing = label_smoothing
        self._top_k = top_k
        self._augmentations, self._mixing = tuple(augmentations), mixing
        self._takes_logits = loss is None or loss.get_config().get("from_logits", False)
        if loss is None:
            checks.warn_of_activation(model, takes_logits=True)

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch: see `ddl.Task.per_example`. Replica context."""
        inputs, label = self.inputs(features), self._heads[""].label
        for augmentation in self._augmentations if training else ():
            inputs = augmentation(inputs, training=True)
        mixed = self._mixing(inputs, features[label]) if training and self._mixing else None
        logits = self.model(inputs if mixed is None else mixed.images, training=training)
        found = self._per_example(features, logits)
        if mixed is not None:
            other = self._per_example({**features, label: mixed.partner_labels}, logits)
            means = [name for name, value in found.metrics.items() if tf.is_tensor(value)]
            metrics = {n: mixed.mean(found.metrics[n], other.metrics[n]) for n in means}
            found = PerExample(mixed.mean(found.loss, other.loss), metrics, found.weight)
        return found

    def _cross_entropy(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        smoothing = self._label_smoothing
        if labels.shape.rank == logits.shape.rank:  # one-hot
            rows = tf.cast(labels, logits.dtype)
            rows += smoothing * (1 / logits.shape[-1] - rows)
            return tf.nn.softmax_cross_entropy_with_logits(rows, logits)
        # Refuses labels out of range, for which `tf.one_hot` would give zeros.
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int64), logits)
        if smoothing:
            evenly = tf.reduce_logsumexp(logits, -1) - tf.reduce_mean(logits, -1)
            loss += smoothing * (evenly - loss)
        return loss

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        one_hot = labels.shape.rank == outputs.shape.rank
        if not labels.shape.is_compatible_with(outputs.shape[: None if one_hot else -1]):
            raise ConfigError(
                f"{self._name} needs logits of the shape of the labels, {tuple(labels.shape)}, and "
                f"a last dimension of classes, but {self.model.name!r} returns "
                f"{tuple(outputs.shape)}. Change the model's last layers, or the labels."
            )
        # Integers have no argmax on GPUs.
        rows = tf.cast(labels, tf.float32 if one_hot else tf.int64)
        classes = tf.argmax(rows, -1) if one_hot else rows
        loss = head.loss(labels, outputs)
        is_plain = head.loss == self._cross_entropy and not one_hot and not self._label_smoothing
        right = accuracy(classes, outputs, loss if is_plain else None)
        metrics: dict[str, Any] = {"accuracy": right}
        if self._top_k is not None:
            metrics[f"top_{self._top_k}_accuracy"] = top_k_accuracy(classes, outputs, self._top_k)
        if head.metrics:
            rows = tf.one_hot(classes, outputs.shape[-1], dtype=tf.float64)
            chances = tf.cast(outputs, tf.float64)
            chances = tf.nn.softmax(chances) if self._takes_logits else chances
            metrics |= {name: metric(rows, chances) for name, metric in head.metrics.items()}
        return Compared(loss, metrics, valid_in_loss=getattr(loss, "_keras_mask", None))

    def _check_label(self, source: Any, head: Head) -> None:
        spec, shape = source.element_spec[head.label], checks.output_shape(self.model)
        last = shape[-1] if shape else None
        one_hot = spec.shape.rank == (len(shape) if shape else 1) and spec.shape[-1] != 1
        end = last - 1 if last else "classes - 1"
        form = "one-hot rows" if one_hot else f"integers from 0 to {end} (or one-hot rows)"
        wanted = shape if one_hot or shape is None else shape[:-1]
        checks.check_label(self, spec, head.label, form, wanted)
        if not one_hot and self._ignored is None:
            checks.check_range(source, head.label, last, "Labels", self._remedy)


class Segmentation(Classification):
    """A model from images to logits of each pixel, such as a U-Net.

    The loss is the cross-entropy: the mean over all pixels of the global batch. Pixels of the class
    `ignored` weigh 0. Reports "accuracy" and "mean_iou", the mean over the classes of the
    intersection over union; class weights do not change "mean_iou".
    """

    _remedy = (
        "Resize the masks with the images and store them as integers; set the model's num_classes, "
        "or Segmentation.ignored for unlabelled pixels."
    )

    def __init__(self, model: keras.Model, *, ignored: int | None = None, **names: Any):
        """Initializes the task.

        Args:
          model: Maps images [batch, height, width, channels] to logits [batch, height, width,
            classes].
          ignored: Label of pixels to leave out, such as 255 for unlabelled borders; None leaves
            out none.
          names: `input_name`, `label_name` and `class_weight`, as of `Supervised`; labels are
            integer [height, width].

        Raises:
          ConfigError: If the model is none, its number of classes is not known, or augmentations
            or mixing are given.
        """
        if names.get("augmentations") or names.get("mixing"):
            what = "augmentations and no mixing: masks would stay as they are"
            raise ConfigError(f"Segmentation takes no {what}. Change both in the data's `decode`.")
        super().__init__(model, **names)
        classes = (checks.output_shape(model) or (None,))[-1]
        self._mean_iou = KerasMetric("MeanIoU", {"num_classes": classes})
        self._ignored = ignored

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        valid = None if self._ignored is None else labels != self._ignored
        if valid is not None:
            labels = tf.where(valid, labels, tf.zeros([], labels.dtype))
        found = super()._compared(head, labels, outputs)
        found.metrics["mean_iou"] = self._mean_iou(labels, tf.argmax(outputs, axis=-1))
        return found._replace(valid=valid)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the class of each pixel, int64 [batch, height, width]."""
        return tf.argmax(super().predict(features), axis=-1)


class MultiLabel(Supervised):
    """A model from inputs to one logit for each class, each a yes or no of its own.

    The loss of an example is the mean over the classes of the binary cross-entropy. Reports
    "binary_accuracy", the share of classes that are right, "exact_match", 1 where all are,
    "f1_micro" and "f1_macro", the F1 score of all classes together and its mean over the classes,
    "auc", the area under the ROC curve of all classes together, and "mean_average_precision", the
    mean over the classes of the area under the curve of precision and recall (from 200
    thresholds).
    """

    _remedy = (
        "For one class an example use ddl.Classification, for probabilities ddl.Supervised with a "
        "loss of Keras."
    )

    def __init__(self, model: keras.Model, *, threshold: float = 0.5, **names: Any):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to logits [batch, classes]; a model with several inputs gets
            a dict of the features.
          threshold: Probability from which a class counts as predicted, for the metrics.
          names: `input_name` and `label_name`, as of `Supervised`; labels are 0 or 1 for each
            class.

        Raises:
          ConfigError: If the model is none or its output has another rank, or an argument is out of
            range.
        """
        if names.get("metrics") or names.get("class_weight"):
            raise ConfigError("MultiLabel takes no metrics or class_weight. Use ddl.Supervised.")
        super().__init__(model, tf.nn.sigmoid_cross_entropy_with_logits, **names)
        checks.warn_of_activation(model, takes_logits=True)
        shape = checks.output_shape(model) or (None,)
        if len(shape) != 1 or not 0 < threshold < 1:
            raise ConfigError(
                "MultiLabel needs a model with logits [batch, classes] and a threshold between 0 "
                f"and 1, but {model.name!r} returns {(None, *shape)}, with {threshold}."
            )
        self._threshold = float(np.log(threshold / (1 - threshold)))
        average_precision = KerasMetric("AUC", {"curve": "PR", "multi_label": True})
        self._of_chances = {"auc": KerasMetric("AUC"), "mean_average_precision": average_precision}
        kinds = {f"f1_{kind}": {"average": kind, "threshold": 0.5} for kind in ("micro", "macro")}
        self._f1 = {name: KerasMetric("F1Score", kind) for name, kind in kinds.items()}

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        # Not every source has the values as an array to check.
        labels = tf.cast(labels, outputs.dtype)
        labels = tf.where((labels == 0) | (labels == 1), labels, np.nan)
        message = f"Feature {head.label!r} has a value other than 0 and 1 (MultiLabel)"
        labels = tf.debugging.check_numerics(labels, message)
        loss = tf.reduce_mean(head.loss(labels, outputs), axis=-1)
        # A logit that is not a number is above no threshold, and predicts nothing.
        predicted = outputs >= self._threshold
        right = tf.equal(predicted, labels >= 0.5) & ~tf.math.is_nan(outputs)
        chances = tf.sigmoid(tf.cast(outputs, tf.float64))
        metrics: dict[str, Any] = {
            "binary_accuracy": right,
            "exact_match": tf.reduce_all(right, axis=-1),
            **{name: f1(labels, tf.cast(predicted, "float64")) for name, f1 in self._f1.items()},
            **{name: metric(labels, chances) for name, metric in self._of_chances.items()},
        }
        return Compared(loss, metrics)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the probability of each class, [batch, classes]."""
        return tf.sigmoid(checks.in_float32(super().predict(features)))

    def _check_label(self, source: Any, head: Head) -> None:
        spec, shape = source.element_spec[head.label], checks.output_shape(self.model) or (None,)
        checks.check_label(self, spec, head.label, "0 or 1 for each class", shape)
        checks.check_range(source, head.label, 2, "Labels of MultiLabel", self._remedy)


def accuracy(labels: tf.Tensor, logits: tf.Tensor, loss: tf.Tensor | None = None) -> tf.Tensor:
    """Returns 1.0 where the largest logit is the label's, else 0.0.

    Ties go to the first class. A row with a NaN counts as wrong.

    Args:
      labels: integer [batch, …].
      logits: float [batch, …, classes].
      loss: Their cross-entropy, [batch, …], which is NaN where a row has a NaN or +∞; it takes a
        reduction less than looking at all logits.

    Returns:
      float32 [batch, …].
    """
    is_right = tf.equal(tf.argmax(logits, axis=-1), tf.cast(labels, tf.int64))
    is_nan = tf.reduce_any(tf.math.is_nan(logits), -1) if loss is None else tf.math.is_nan(loss)
    return tf.where(is_nan, tf.zeros([]), tf.cast(is_right, tf.float32))


def top_k_accuracy(labels: tf.Tensor, logits: tf.Tensor, k: int) -> tf.Tensor:
    """Returns 1.0 where the label is among the `k` largest logits, else 0.0.

    Ties count against the label, so that equal logits for all classes are not counted as right. A
    row with a NaN counts as wrong.

    Args:
      labels: integer [batch].
      logits: float [batch, classes].
      k: Number of largest logits that count.

    Returns:
      float32 [batch].
    """
    own = tf.gather(logits, tf.cast(labels, tf.int64), batch_dims=1)
    at_least = tf.reduce_sum(tf.cast(logits >= own[:, tf.newaxis], tf.float32), axis=-1)
    # Comparisons with NaN are false.
    return tf.cast((at_least <= k) & ~tf.reduce_any(tf.math.is_nan(logits), axis=-1), tf.float32)
