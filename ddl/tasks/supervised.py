"""Supervised training with losses and metrics of Keras, by name or by function."""

import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.metrics.keras_metric import KerasMetric, check_names
from ddl.tasks.checks import check_input, check_kind, fits, without_one
from ddl.tasks.inputs import check_named_inputs, inputs_of
from ddl.tasks.task import PerExample

# Functions of Keras that compare each entry of the labels with one of the outputs.
_BY_ENTRIES = (
    *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error"),
    *("mean_squared_logarithmic_error", "log_cosh", "huber", "poisson", "kl_divergence"),
    *("hinge", "squared_hinge", "binary_crossentropy", "binary_focal_crossentropy"),
    *("binary_accuracy", "categorical_accuracy", "top_k_categorical_accuracy"),
    *("categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge"),
)

# Called with labels and outputs [batch, …]; returns [batch, …].
_Function = Callable[[Any, Any], Any]


class Supervised:
    """A model, a loss and metrics, named as in Keras's `compile`.

    The features are the inputs, the label, and optionally "weight". A pair (x, y) has the features
    "image" and "label"; a pair (dict, y) has the features of the dict and "label". A model with one
    input gets that of `input_name`, or the only one; a model with several gets a dict of all.

    As everywhere in ddl, loss and metrics are means weighted by example weight and class weight,
    divided by the sum of the weights; Keras divides the loss by the number of examples.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: str | keras.losses.Loss | _Function,
        *,
        metrics: Sequence[str | keras.metrics.Metric | KerasMetric | _Function] = (),
        class_weight: Mapping[int, float] | None = None,
        input_name: str = "image",
        label_name: str = "label",
    ):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to outputs [batch, …].
          loss: Name of a Keras loss such as "mse", a Keras loss with reduction=None, or a function
            of (labels, outputs) to [batch, …]. Entries of an example beyond the first dimension
            are averaged.
          metrics: Names of Keras metrics such as "accuracy" or "AUC", Keras metrics,
            `ddl.metrics.KerasMetric`, or functions like a loss, named after the function. The state
            of a metric that is no mean over examples must add up.
          class_weight: Weight of the examples of each class; others weigh 1. Labels are integers
            [batch] or [batch, 1], or one-hot rows [batch, classes].
          input_name: Name of the input feature.
          label_name: Name of the label feature.

        Raises:
          ConfigError: If the model is no Keras model, a loss or metric is unknown, a loss has a
            reduction, or a class weight is no number of at least 0.
        """
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"Supervised.model must be a Keras model, got {model!r:.80}. Pass a keras.Model."
            )
        self.model = model
        self.input_name = input_name
        self.label_name = label_name
        self._loss = _loss(loss)
        if isinstance(metrics, str):
            raise ConfigError(
                f"Supervised.metrics must be a list, got {metrics!r}. Write [{metrics!r}]."
            )
        named = list(map(_metric, metrics))
        check_names("Supervised.metrics", [name for name, _ in named])
        self._metrics = dict(named)
        self._class_weight = _checked_weights(class_weight)

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch: see `ddl.Task.per_example`. Replica context."""
        outputs = self._outputs(features, training)
        outputs = tf.cast(outputs, tf.float64 if outputs.dtype == tf.float64 else tf.float32)
        labels = features[self.label_name]
        weight = None
        if self._class_weight:
            weight = _class_weights(labels, outputs, self._class_weight)
        labels = _of_rank(labels, outputs)
        metrics = {
            name: metric(labels, outputs)
            if isinstance(metric, KerasMetric)
            else _per_row(tf.cast(metric(labels, outputs), tf.float64))
            for name, metric in self._metrics.items()
        }
        return PerExample(_per_row(self._loss(labels, outputs)), metrics, weight)

    def predict(self, features: dict[str, Any]) -> Any:
        """Returns the model's outputs. Labels are not read. Replica context."""
        inputs = inputs_of(self.model, features, self.input_name, self.label_name)
        return self.model(inputs, training=False)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If the label or an input of the model is missing, there is no input, or text
            stands where the model or Keras's loss needs numbers.
          ConfigError: If a model with one input has several features to choose from.
        """
        spec = source.element_spec
        if self.label_name not in spec:
            raise DataError(
                f"The data have no feature {self.label_name!r}, only {', '.join(sorted(spec))}. "
                "Rename it in the data, or set label_name of Supervised."
            )
        if not spec.keys() - {self.label_name, "weight"}:
            raise DataError(
                f"Supervised needs an input beside the label {self.label_name!r}, got only the "
                f"features {', '.join(sorted(spec))}. Add the input of the model to the data."
            )
        check_named_inputs(self.model, spec, self.label_name)
        taken = inputs_of(self.model, spec, self.input_name, self.label_name)
        inputs: Sequence[Any] = getattr(self.model, "inputs", None) or ()
        if len(inputs) == 1 and isinstance(taken, tf.TensorSpec):
            name = next(name for name, each in spec.items() if each is taken)
            check_kind(self.model, name, taken, inputs[0].dtype)
            expected = without_one(tuple(inputs[0].shape[1:]))
            # Keras adds a last dimension of 1, or removes it.
            if not fits(expected, without_one(tuple(taken.shape))):
                check_input(self.model, name, taken)
        # A function of the user's may look up text.
        if spec[self.label_name].dtype == tf.string and _is_of_keras(self._loss):
            raise DataError(
                f"Feature {self.label_name!r} must be numbers, got text. Convert it in the data."
            )

    def _outputs(self, features: Mapping[str, Any], training: bool) -> tf.Tensor:
        inputs = inputs_of(self.model, features, self.input_name, self.label_name)
        outputs = self.model(inputs, training=training)
        if not tf.is_tensor(outputs):
            raise ConfigError(
                f"Supervised needs a model with one output, but {self.model.name!r} returns a "
                f"{type(outputs).__name__}. Write a task of your own; see ddl.Task."
            )
        return outputs


def _loss(loss: Any) -> _Function:
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            raise ConfigError(
                f"Supervised.loss must be the name of a Keras loss, such as 'mse' or "
                f"'sparse_categorical_crossentropy', got {loss!r}. Correct the name, or pass a "
                "function of (labels, outputs)."
            ) from None
    if isinstance(loss, keras.losses.Loss) and loss.reduction not in (None, "none"):
        raise ConfigError(
            f"The loss {loss.name!r} must return one value for each example, but it has "
            f"reduction={loss.reduction!r}, a mean or sum over the examples of one replica. "
            "Create it with reduction=None."
        )
    if not callable(loss):
        raise ConfigError(
            f"Supervised.loss must be a name, a Keras loss or a function, got {loss!r:.60}."
        )
    return _checked(loss, "loss")


def _is_of_keras(loss: _Function) -> bool:
    """Returns whether a loss is a function or class of Keras, not of the user's."""
    return (getattr(loss, "__module__", None) or "").partition(".")[0] == "keras"


def _metric(metric: Any) -> tuple[str, _Function | KerasMetric]:
    if isinstance(metric, str) and metric in ("accuracy", "acc"):
        return "accuracy", _accuracy
    given = metric
    if isinstance(metric, str):
        try:
            metric = keras.metrics.get(metric)
        except ValueError:
            raise ConfigError(
                f"Supervised.metrics must hold names of Keras metrics, such as 'accuracy' or "
                f"'mae', got {given!r}. Correct the name, or pass a function of (labels, outputs)."
            ) from None
        except TypeError:  # it needs arguments, which `KerasMetric` says
            metric = KerasMetric(metric)
    if isinstance(metric, KerasMetric):
        return metric.name, metric
    if isinstance(metric, type) and issubclass(metric, keras.metrics.Metric):
        metric = metric()
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        function, arguments = metric._fn, metric._fn_kwargs
        name = given if isinstance(given, str) else metric.name
        checked = _checked(function, "metric")
        return name, lambda labels, outputs: checked(labels, outputs, **arguments)
    if isinstance(metric, keras.metrics.Metric):
        adding_up = KerasMetric(given if isinstance(given, str) else metric)
        return adding_up.name, adding_up
    if not callable(metric):
        raise ConfigError(
            f"Supervised.metrics must hold names, Keras metrics or functions, got {given!r:.60}."
        )
    return getattr(metric, "__name__", type(metric).__name__), _checked(metric, "metric")


def _checked(function: Any, kind: str) -> _Function:
    """Returns a loss or metric of Keras's, by entries, that refuses outputs of another shape.

    Keras would broadcast: it would compare labels [batch, 2] with the one output of each example.
    """
    own = getattr(function, "fn", function)  # the function of a Loss
    name = getattr(own, "__name__", "")
    if name not in _BY_ENTRIES or not own.__module__.startswith("keras."):
        return function

    @functools.wraps(function, updated=())
    def checked(labels: Any, outputs: Any, **arguments: Any) -> Any:
        of_labels, of_outputs = tf.TensorShape(labels.shape), tf.TensorShape(outputs.shape)
        if not of_labels[1:].is_compatible_with(of_outputs[1:]):
            sparse = f"sparse_{name}"
            remedy = (
                f" For integer labels, use {sparse!r}." if hasattr(keras.metrics, sparse) else ""
            )
            raise ConfigError(
                f"The {kind} {name!r} of Supervised needs outputs in the shape of the labels, got "
                f"outputs {tuple(of_outputs)} for labels {tuple(of_labels)}. Change the model's "
                f"last layer, or the labels.{remedy}"
            )
        return function(labels, outputs, **arguments)

    return checked


def _accuracy(labels: Any, outputs: Any) -> Any:
    """Chooses the accuracy by the shapes, as Keras does."""
    if outputs.shape[-1] == 1 or outputs.shape.rank == 1:
        return _checked(keras.metrics.binary_accuracy, "metric")(labels, outputs)
    sparse = labels.shape.rank < outputs.shape.rank or labels.shape[-1] == 1
    if sparse:
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)
    return keras.metrics.categorical_accuracy(labels, outputs)


def _of_rank(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns labels in the shape of outputs, if one of them has a last dimension of 1.

    Most functions would broadcast [batch] against [batch, 1], each label against all outputs.
    """
    if outputs.shape.rank == labels.shape.rank + 1 and outputs.shape[-1] == 1:
        return labels[..., tf.newaxis]
    if labels.shape.rank == outputs.shape.rank + 1 and labels.shape[-1] == 1:
        return labels[..., 0]
    return labels


def _per_row(values: Any) -> tf.Tensor:
    """Returns the mean of each example: [batch]."""
    values = tf.convert_to_tensor(values)
    rank = values.shape.rank
    return values if not rank else tf.reduce_mean(values, list(range(1, rank)))


def _checked_weights(weights: Any) -> dict[int, float]:
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"Supervised.class_weight must be a dict from class to weight, got {weights!r:.60}."
        )
    for key, value in weights.items():
        is_class = isinstance(key, numbers.Integral) and not isinstance(key, bool)
        if not is_class or not isinstance(value, numbers.Real) or not float(value) >= 0:
            raise ConfigError(
                "Supervised.class_weight must map integers to weights of at least 0, got "
                f"{key!r}: {value!r}."
            )
    return {int(key): float(value) for key, value in weights.items()}


def _class_weights(
    labels: tf.Tensor, outputs: tf.Tensor, weights: Mapping[int, float]
) -> tf.Tensor:
    """Returns the weight of each example: float32 [batch]."""
    if labels.shape.rank == 2 and labels.shape[-1] > 1:
        if outputs.shape.rank != 2 or outputs.shape[-1] != labels.shape[-1]:
            raise ConfigError(
                "class_weight needs labels that are one class for each example, or one-hot rows as "
                f"wide as the outputs, got labels {tuple(labels.shape)} for outputs "
                f"{tuple(outputs.shape)}. Leave class_weight out, or give a feature weight."
            )
        classes = tf.argmax(tf.cast(labels, tf.float32), axis=-1)
    else:
        classes = tf.cast(tf.reshape(labels, [-1]), tf.int64)
    found = tf.ones(tf.shape(classes))
    for number, weight in weights.items():
        found = tf.where(classes == number, tf.constant(weight), found)
    return found
