"""Classification with integer or one-hot labels: of examples, and of pixels."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.devices.path import path_of
from ddl.devices.wide_integers import as_int64
from ddl.errors import ConfigError, DataError
from ddl.layers.transforms.mixing import Mixed
from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.means import MeanByClass
from ddl.tasks.checks import arrays_of, check_label, check_range, fits, names_of, output_shape
from ddl.tasks.supervised import Compared, Head, Supervised
from ddl.tasks.task import PerExample

# Called with inputs [batch, …] and training=True.
Augmentation: TypeAlias = Callable[..., tf.Tensor]

# Called with inputs [batch, …] and labels [batch, …].
Mixing: TypeAlias = Callable[[tf.Tensor, tf.Tensor], Mixed]


class Classification(Supervised):
    """Single-label classification: a model from inputs to one logit per class.

    The task reads the features "image" and "label" (see `input_name`, `label_name`). A model with
    several inputs, such as `ddl.models.table_mlp`, gets a dict of the features that it names.
    Labels are integers [batch] or one-hot rows [batch, classes]. Reports "accuracy", with `top_k`
    "top_<k>_accuracy", and those of `metrics` and by class.
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
        by_class: bool = False,
        augmentations: Sequence[Augmentation] = (),
        mixing: Mixing | None = None,
        input_name: str = "image",
        label_name: str = "label",
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
          by_class: Whether to report also the means of loss and accuracy over the examples of each
            class, as "loss_by_class/3" and "accuracy_by_class/3".
          augmentations: Callables such as layers of `ddl.layers`, applied to the inputs in order,
            in training only. They are not exported.
          mixing: `ddl.layers.Mixup` or `ddl.layers.CutMix`, applied after the augmentations, in
            training only. Loss and accuracies of training are then means of those for both
            labels, and it reports none of `metrics` and nothing by class.
          input_name: Name of the input feature of a model with one input.
          label_name: Name of the label feature.

        Raises:
          ConfigError: If `loss` has a reduction, `mixing` is a layer of Keras, a model with several
            inputs has augmentations or mixing, or another argument is out of range.
        """
        super().__init__(
            model,
            loss or self._cross_entropy,
            metrics=metrics,
            input_name=input_name,
            label_name=label_name,
        )
        if not 0 <= label_smoothing < 1 or (label_smoothing and loss is not None):
            raise ConfigError(
                f"{self._name}.label_smoothing must be at least 0 and below 1, and only without a "
                f"loss, got {label_smoothing}. A Keras loss takes it in its constructor."
            )
        if top_k is not None and top_k < 1:
            raise ConfigError(f"{self._name}.top_k must be at least 1, or None, got {top_k}.")
        if isinstance(mixing, keras.layers.Layer) and not hasattr(mixing, "draws_by_position"):
            raise ConfigError(
                f"{self._name}.mixing must be ddl.layers.Mixup or ddl.layers.CutMix, got Keras's "
                f"{type(mixing).__name__}, which mixes the rows of one replica."
            )
        if (augmentations or mixing) and names_of(model) is not None:
            raise ConfigError(
                f"{self._name}.augmentations and mixing need a model with one input, but "
                f"{model.name!r} takes {', '.join(names_of(model) or ())}. Change the features in "
                "the data, or write a task of your own."
            )
        if "accuracy" in self._heads[""].metrics:
            raise ConfigError(f"{self._name} always reports the accuracy. Remove it from metrics.")
        self._ignored: int | None = None
        self._by_class = by_class
        self._label_smoothing = label_smoothing
        self._top_k = top_k
        self._augmentations = tuple(augmentations)
        self._mixing = mixing
        self._takes_logits = loss is None or loss.get_config().get("from_logits", False)
        last = model.layers[-1] if model.layers else None
        if self._takes_logits and (
            isinstance(last, keras.layers.Softmax)
            or getattr(last, "activation", None) is keras.activations.softmax
        ):
            logging.warning(
                "The model %r ends in a softmax, but the loss takes logits. The probabilities are "
                "normalized twice, so training is slow and its result poor. Remove the softmax.",
                model.name,
            )

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch: see `ddl.Task.per_example`. Replica context."""
        return self.forward(features, training)[0]

    def forward(
        self, features: dict[str, Any], training: bool
    ) -> tuple[PerExample, tf.Tensor, tf.Tensor]:
        """Returns the result of `per_example`, the augmented inputs and the logits."""
        inputs, label = self._inputs(features), self._heads[""].label
        mixed: Mixed | None = None
        for augmentation in self._augmentations if training else ():
            inputs = augmentation(inputs, training=True)
        if training and self._mixing is not None:
            mixed = self._mixing(inputs, features[label])
            inputs = mixed.images
        logits = self.model(inputs, training=training)
        found = self._per_example(features, logits)
        if mixed is not None:
            other = self._per_example({**features, label: mixed.partner_labels}, logits)
            metrics = {
                name: mixed.mean(value, other.metrics[name])
                for name, value in found.metrics.items()
                if tf.is_tensor(value)
            }
            found = PerExample(mixed.mean(found.loss, other.loss), metrics, found.weight)
        return found, inputs, logits

    def _cross_entropy(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        one_hot = labels.shape.rank == logits.shape.rank
        if not one_hot and not self._label_smoothing:
            return cross_entropy(as_int64(labels), logits)
        rows = labels if one_hot else tf.one_hot(as_int64(labels), logits.shape[-1])
        rows = tf.cast(rows, logits.dtype)
        rows += self._label_smoothing * (1 / logits.shape[-1] - rows)
        return tf.nn.softmax_cross_entropy_with_logits(rows, logits)

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        one_hot = labels.shape.rank == outputs.shape.rank
        expected = (*labels.shape[1 : outputs.shape.rank - 1], None)
        if outputs.shape.rank != len(expected) + 1 or not fits(expected, outputs.shape[1:]):
            raise ConfigError(
                f"{self._name} needs logits of the shape of the labels, {tuple(labels.shape)}, and "
                f"a last dimension of classes, but {self.model.name!r} returns "
                f"{tuple(outputs.shape)}. Change the model's last layers, or the labels."
            )
        # Integers have no argmax on GPUs.
        classes = tf.argmax(tf.cast(labels, tf.float32), -1) if one_hot else as_int64(labels)
        loss = head.loss(labels, outputs)
        metrics: dict[str, Any] = {"accuracy": accuracy(classes, outputs, loss)}
        if self._top_k is not None:
            metrics[f"top_{self._top_k}_accuracy"] = top_k_accuracy(classes, outputs, self._top_k)
        if self._by_class:
            mean = MeanByClass(outputs.shape[-1])
            metrics["loss_by_class"] = mean(classes, loss)
            metrics["accuracy_by_class"] = mean(classes, metrics["accuracy"])
        if head.metrics:
            rows = tf.one_hot(classes, outputs.shape[-1], dtype=tf.float64)
            chances = tf.cast(outputs, tf.float64)
            chances = tf.nn.softmax(chances) if self._takes_logits else chances
            metrics |= {name: metric(rows, chances) for name, metric in head.metrics.items()}
        return Compared(loss, metrics)

    def _check_label(self, source: Any, head: Head) -> None:
        spec, shape = source.element_spec[head.label], output_shape(self.model)
        last = shape[-1] if shape else None
        one_hot = spec.shape.rank == (len(shape) if shape else 1) and spec.shape[-1] != 1
        form = f"integers from 0 to {last - 1 if last else 'classes - 1'}, or one-hot rows"
        wanted = shape if one_hot or shape is None else shape[:-1]
        check_label(self, spec, head.label, form, wanted, self._remedy, integers=not one_hot)
        labels = arrays_of(source).get(head.label)
        if not one_hot and self._ignored is None:
            check_range(source, head.label, last, "Labels", self._remedy)
        elif one_hot and labels is not None and not np.allclose(labels.sum(-1), 1):
            row = int(np.argmax(~np.isclose(labels.sum(-1).reshape(len(labels), -1), 1).all(1)))
            raise DataError(
                f"One-hot labels must sum to 1 (feature {head.label!r}), got "
                f"{labels[row].tolist()!s:.80} in example {row}. For several classes an example, "
                "use ddl.MultiLabel."
            )


class Segmentation(Classification):
    """A model from images to logits of each pixel, such as `ddl.models.unet`.

    The loss is the cross-entropy: the mean over all pixels of the global batch. Pixels of the class
    `ignored` weigh 0. Reports "accuracy" and "mean_iou", the mean over the classes of the
    intersection over union; class weights do not change "mean_iou".
    """

    _remedy = (
        "Resize the masks with the images and store them as integers; set the model's num_classes, "
        "or Segmentation.ignored for unlabelled pixels."
    )

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
        super().__init__(model, input_name=input_name, label_name=label_name)
        shape = output_shape(model)
        classes = shape[-1] if shape and len(shape) == 3 else None
        if classes is None or len(class_weights or range(classes)) != classes:
            raise ConfigError(
                "Segmentation needs a model with logits [batch, height, width, classes], and a "
                f"weight for each class, but {model.name!r} returns "
                f"{shape and (None, *shape)} and the weights are {class_weights}. Return logits of "
                "all pixels, as ddl.models.unet does."
            )
        self._class_weight = self._checked_weights(dict(enumerate(class_weights or ())))
        self._mean_iou = KerasMetric("MeanIoU", {"num_classes": classes, "name": "mean_iou"})
        self._ignored = ignored

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        valid = None
        if self._ignored is not None:
            valid = labels != self._ignored
            labels = tf.where(valid, labels, tf.zeros([], labels.dtype))
        found = super()._compared(head, labels, outputs)
        found.metrics["mean_iou"] = self._mean_iou(labels, tf.argmax(outputs, axis=-1))
        return found._replace(valid=valid)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the class of each pixel, int64 [batch, height, width]."""
        return tf.argmax(super().predict(features), axis=-1)


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the cross-entropy of each example, or token.

    Args:
      labels: integer [batch, …]. Labels outside of the classes give NaN on a GPU, and elsewhere an
        error of TensorFlow.
      logits: float32 or float64 [batch, …, classes].

    Returns:
      [batch, …], in the dtype of the logits.
    """
    if logits.dtype != tf.float64 or path_of().has_float64_losses:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    # The same, up to rounding, by operations that have float64 kernels for GPUs.
    is_own = tf.one_hot(labels, tf.shape(logits)[-1], True, False, dtype=tf.bool)
    # tf.where, not a product: other logits may be -∞.
    own = tf.where(is_own, tf.nn.log_softmax(logits), tf.zeros([], logits.dtype))
    nan = tf.constant(math.nan, logits.dtype)
    return tf.where(tf.reduce_any(is_own, axis=-1), -tf.reduce_sum(own, axis=-1), nan)


def accuracy(labels: tf.Tensor, logits: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
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
    is_right = tf.equal(tf.argmax(logits, axis=-1), as_int64(labels))
    return tf.cast(is_right & ~tf.math.is_nan(loss), tf.float32)


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
    is_nan = tf.reduce_any(tf.math.is_nan(logits), axis=-1)
    return tf.cast((at_least <= k) & ~is_nan, tf.float32)
