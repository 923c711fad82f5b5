"""Classification with integer or one-hot labels."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.errors import ConfigError, DataError
from ddl.layers.transforms.mixing import Mixed
from ddl.metrics.keras_metric import KerasMetric, check_names
from ddl.metrics.mean_by_class import MeanByClass
from ddl.metrics.values import Value
from ddl.tasks.accuracy import accuracy, top_k_accuracy
from ddl.tasks.checks import check_features, in_float32
from ddl.tasks.cross_entropy import cross_entropy
from ddl.tasks.inputs import check_inputs, check_looked_up, inputs_of, names_of
from ddl.tasks.task import PerExample

# Called with inputs [batch, …] and training=True.
Augmentation: TypeAlias = Callable[..., tf.Tensor]

# Called with inputs [batch, …] and labels [batch, …].
Mixing: TypeAlias = Callable[[tf.Tensor, tf.Tensor], Mixed]

_LABEL_CHUNK = 1 << 20


class Classification:
    """Single-label classification: a model from inputs to one logit per class.

    The task reads the features "image" and "label" (see `input_name`, `label_name`). A model with
    several inputs, such as `ddl.models.table_mlp`, gets a dict of the features that it names.
    Labels are integers [batch] or one-hot rows [batch, classes].
    """

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
          augmentations: Callables such as Keras's layers, applied to the inputs in order,
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
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"Classification.model must be a Keras model, got {model!r:.80}. Pass a "
                "keras.Model, such as ddl.models.cnn(…), or in a config a reference with "
                "parentheses, such as @cnn()."
            )
        if loss is not None and loss.reduction not in (None, "none"):
            raise ConfigError(
                f"The loss {loss.name!r} must return one value for each example, but it has "
                f"reduction={loss.reduction!r}, a mean or sum over the examples of one replica. "
                "Create it with reduction=None."
            )
        if not 0 <= label_smoothing < 1 or (label_smoothing and loss is not None):
            raise ConfigError(
                "Classification.label_smoothing must be at least 0 and below 1, and can be used "
                f"with the default cross-entropy only, got {label_smoothing}. Set the "
                "label_smoothing of a Keras loss in its constructor."
            )
        if top_k is not None and top_k < 1:
            raise ConfigError(f"Classification.top_k must be at least 1, or None, got {top_k}.")
        if isinstance(mixing, keras.layers.MixUp | keras.layers.CutMix):
            raise ConfigError(
                "Classification.mixing must be ddl.layers.Mixup or ddl.layers.CutMix, got Keras's "
                f"{type(mixing).__name__}, which mixes the rows of one replica."
            )
        if (augmentations or mixing) and names_of(model) is not None:
            raise ConfigError(
                "Classification.augmentations and Classification.mixing need a model with one "
                f"input, but {model.name!r} takes {', '.join(names_of(model) or ())}. Change the "
                "features in the data, or write a task of your own."
            )
        self.model = model
        if isinstance(metrics, str):
            raise ConfigError(
                f"Classification.metrics must be a list, got {metrics!r}. Write [{metrics!r}]."
            )
        self._metrics = [_keras_metric(metric) for metric in metrics]
        check_names("Classification.metrics", [metric.name for metric in self._metrics])
        self._by_class = by_class
        self._loss = loss
        self._label_smoothing = label_smoothing
        self._top_k = top_k
        self._augmentations = tuple(augmentations)
        self._mixing = mixing
        self.input_name = input_name
        self._label_name = label_name
        self._takes_logits = loss is None or loss.get_config().get("from_logits", False)
        if self._takes_logits and _ends_in_softmax(model):
            logging.warning(
                "The model %r ends in a softmax, but the loss takes logits. The probabilities are "
                "normalized twice, so training is slow and its result poor. Remove the softmax.",
                model.name,
            )

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch: see `ddl.Task.per_example`. Replica context.

        Args:
          features: Inputs [batch, …]; labels, integer [batch] or one-hot [batch, classes].
          training: Whether to apply the augmentations and run the model in training mode.

        Returns:
          The loss [batch], and the metrics "accuracy" and, with `top_k`, "top_<k>_accuracy", each
          float32 [batch], and those of `metrics` and by class.
        """
        return self.forward(features, training)[0]

    def forward(
        self, features: dict[str, Any], training: bool
    ) -> tuple[PerExample, tf.Tensor, tf.Tensor]:
        """Returns the result of `per_example`, the augmented inputs and the logits."""
        inputs, labels = self._inputs(features), features[self._label_name]
        mixed: Mixed | None = None
        if training:
            for augmentation in self._augmentations:
                inputs = augmentation(inputs, training=True)
            if self._mixing is not None:
                mixed = self._mixing(inputs, labels)
                inputs = mixed.images
        logits = self.model(inputs, training=training)
        if not tf.is_tensor(logits) or logits.shape.rank not in (2, None):
            got = logits.shape if tf.is_tensor(logits) else f"a {type(logits).__name__}"
            raise ConfigError(
                f"Classification needs a model with one output of shape [batch, classes], but "
                f"{self.model.name!r} returns {got}. Flatten or pool its output before a last "
                "keras.layers.Dense, or write a task of your own."
            )
        logits = in_float32(logits)
        loss, values = self._compared(labels, logits)
        if mixed is not None:
            other_loss, others = self._compared(mixed.partner_labels, logits)
            loss = mixed.mean(loss, other_loss)
            values = {name: mixed.mean(each, others[name]) for name, each in values.items()}
            return PerExample(loss, values), inputs, logits
        if self._by_class:
            mean, classes = MeanByClass(logits.shape[-1]), _classes(labels)
            values["loss_by_class"] = mean(classes, loss)
            values["accuracy_by_class"] = mean(classes, values["accuracy"])
        return PerExample(loss, values | self._of_keras(labels, logits)), inputs, logits

    def _compared(self, labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, dict[str, Any]]:
        """Returns the loss and the accuracies of labels, each [batch]."""
        classes, one_hot = _classes(labels), labels.shape.rank == 2
        own: tf.Tensor | None = None
        if self._loss is not None:
            loss = self._loss(labels, logits)
        elif one_hot or self._label_smoothing:
            rows = labels if one_hot else tf.one_hot(classes, logits.shape[-1])
            rows = tf.cast(rows, logits.dtype)
            rows += self._label_smoothing * (1 / logits.shape[-1] - rows)
            loss = tf.nn.softmax_cross_entropy_with_logits(rows, logits)
        else:
            loss = own = cross_entropy(classes, logits)
        values = {"accuracy": accuracy(classes, logits, own)}
        if self._top_k is not None:
            values[f"top_{self._top_k}_accuracy"] = top_k_accuracy(classes, logits, self._top_k)
        return loss, values

    def _of_keras(self, labels: tf.Tensor, logits: tf.Tensor) -> dict[str, Value]:
        """Returns the values of `metrics`."""
        if not self._metrics:
            return {}
        rows = tf.one_hot(_classes(labels), logits.shape[-1], dtype=tf.float64)
        chances = tf.cast(logits, tf.float64)
        chances = tf.nn.softmax(chances) if self._takes_logits else chances
        return {metric.name: metric(rows, chances) for metric in self._metrics}

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the model's outputs [batch, classes]. Replica context.

        Args:
          features: Inputs [batch, …]; labels are not read.
        """
        return self.model(self._inputs(features), training=False)

    def _inputs(self, features: dict[str, Any]) -> Any:
        return inputs_of(self.model, features, self.input_name, self._label_name)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a feature is missing, the input shape does not fit the model, or the labels
            are neither integers from 0 to classes - 1 nor one-hot rows of length `classes`. Label
            values are checked where the source has them as arrays.
        """
        spec = source.element_spec
        names = {"input_name": self.input_name, "label_name": self._label_name}
        if names_of(self.model) is not None:
            names.pop("input_name")
        check_features(spec, names, "Classification")
        check_inputs(self.model, spec, self.input_name, self._label_name, "Classification")
        check_looked_up(self.model, source, self.input_name)
        classes = self._num_classes()
        label_spec = spec[self._label_name]
        if label_spec.dtype == tf.string:
            raise DataError(
                f"Labels must be integers or one-hot rows, but feature {self._label_name!r} is "
                "text. Number the classes: np.unique(labels, return_inverse=True)[1]."
            )
        if label_spec.shape.rank not in (None, 0, 1):
            raise DataError(
                "Classification needs an integer or a one-hot row for each example, but feature "
                f"{self._label_name!r} has shape {tuple(label_spec.shape)}. Reshape it, or use "
                "ddl.Segmentation for pixels and ddl.LanguageModel for tokens."
            )
        arrays = getattr(source, "arrays", None) or {}
        labels = arrays.get(self._label_name) if isinstance(arrays, dict) else None
        if label_spec.shape.rank == 1:
            self._check_one_hot(label_spec, labels, classes)
        else:
            self._check_integers(label_spec, labels, classes)

    def _num_classes(self) -> int | None:
        outputs = getattr(self.model, "outputs", None)
        return outputs[0].shape[-1] if outputs else None

    def _check_integers(
        self, spec: tf.TensorSpec, labels: np.ndarray | None, classes: int | None
    ) -> None:
        if not spec.dtype.is_integer:
            scaled = labels is not None and labels.size and 0 <= labels.min() <= labels.max() <= 1
            last = "classes - 1" if classes is None else classes - 1
            raise DataError(
                f"Labels must be integers from 0 to {last}, got {spec.dtype.name}. "
                + (
                    "They lie between 0 and 1, so they may have been scaled with the inputs. Leave "
                    "them unscaled, as integers."
                    if scaled
                    else "Convert them by .astype('int64'); for other targets, use ddl.Regression."
                )
            )
        if labels is None or classes is None:
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            row = int(np.argmax((labels < 0) | (labels >= classes)))
            raise DataError(
                f"Labels must be from 0 to {classes - 1}, since the model has {classes} classes, "
                f"got {low} to {high} (first at example {row}). Correct the labels or the model's "
                "num_classes."
            )

    def _check_one_hot(
        self, spec: tf.TensorSpec, labels: np.ndarray | None, classes: int | None
    ) -> None:
        if spec.shape[0] == 1:
            raise DataError("Labels must have shape (n,), got (n, 1). Pass labels[:, 0].")
        if classes is not None and spec.shape[0] != classes:
            raise DataError(
                f"One-hot labels must have one value for each of the model's {classes} classes, "
                f"got {spec.shape[0]}. Correct the labels or the model's num_classes."
            )
        if labels is None:
            return
        for start in range(0, len(labels), _LABEL_CHUNK):
            rows = labels[start : start + _LABEL_CHUNK]
            wrong = (np.count_nonzero(rows, axis=1) != 1) | (rows.max(axis=1) != 1)
            if wrong.any():
                raise DataError(
                    f"Labels with {spec.shape[0]} values per example must be one-hot, got "
                    f"{rows[np.argmax(wrong)].tolist()} in example {start + int(np.argmax(wrong))}"
                    ". For several classes an example, use ddl.MultiLabel; for probabilities, use "
                    "ddl.Supervised with a Keras loss."
                )


def _keras_metric(metric: Any) -> KerasMetric:
    if metric in ("accuracy", "acc"):
        raise ConfigError(
            "Classification always reports the accuracy. Remove it from Classification.metrics."
        )
    return metric if isinstance(metric, KerasMetric) else KerasMetric(metric)


def _classes(labels: tf.Tensor) -> tf.Tensor:
    """Returns the class of each label, int64 [batch]."""
    if labels.shape.rank != 2:
        return tf.cast(labels, tf.int64)
    floats = labels if labels.dtype.is_floating else tf.cast(labels, tf.float32)
    return tf.argmax(floats, axis=-1)  # integers have no argmax on GPUs


def _ends_in_softmax(model: keras.Model) -> bool:
    last = model.layers[-1] if model.layers else None
    return isinstance(last, keras.layers.Softmax) or (
        getattr(last, "activation", None) is keras.activations.softmax
    )
