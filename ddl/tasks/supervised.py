"""Supervised training with losses and metrics of Keras, by name or by function."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError, did_you_mean
from ddl.layers.broadcasting import broadcasts, with_rank
from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.means import WeightedMean
from ddl.metrics.values import Inputs, OfMean, Value
from ddl.tasks import checks
from ddl.tasks.gather import current_batch, gather
from ddl.tasks.task import PerExample

# Functions of Keras whose labels and outputs differ in shape, beside "ctc".
_OF_OTHER_SHAPES = ("circle", "accuracy")

# Called with labels and outputs [batch, …]; returns [batch, …].
_Function = Callable[[Any, Any], Any]


class Head(NamedTuple):
    """How one output of a model is trained: loss, metrics, label feature, factor in the total."""

    loss: _Function
    metrics: Mapping[str, _Function]
    label: str
    factor: float


class Compared(NamedTuple):
    """Values of one output, before any weight.

    Attributes:
      loss: float [batch, …].
      metrics: As in `PerExample`; means may have other shapes than the loss.
      valid: Entries that count in loss and metrics, [batch, …]; None: all.
      valid_in_loss: Entries that count in the loss alone.
    """

    loss: tf.Tensor
    metrics: dict[str, Value]
    valid: tf.Tensor | None = None
    valid_in_loss: tf.Tensor | None = None


class Supervised:
    """A model, its losses and metrics, named as in Keras's `compile`.

    The features are the inputs, the label, and optionally "weight". A pair (x, y) has the features
    "input" and "label"; a pair (dict, y) has the features of the dict and "label". A model with one
    input gets that of `input_name`, or the only one; a model with several gets a dict of all.

    A model with several outputs takes a loss for each, by the output's name: the key of the dict
    that it returns, or else the name in `model.output_names`. The label of an output is the feature
    of its name, as of pairs (x, {name: y}), and (x, {name: y}, {name: weights}) weighs each output.
    The loss is the sum over the outputs, each a mean of its own; "NAME_loss" reports each.

    Loss and metrics are means over the valid entries of the global batch, on any devices: a mask of
    an output (`Embedding(mask_zero=True)`, `Masking`), weights per time step in (x, y, w), and, in
    the loss, its `ignore_class` weigh entries. All weights multiply, and ddl divides by their sum,
    as Keras does with reduction="mean_with_sample_weight"; by default Keras divides by the number
    of entries. Outputs whose masks differ need the whole batch at once, so ACCUMULATION_STEPS must
    be 1, and an evaluation's loss is a mean over its batches, as in Keras.
    """

    _remedy = "Convert it in the data."

    def __init__(
        self,
        model: keras.Model,
        loss: Any,
        *,
        metrics: Any = (),
        loss_weights: Any = None,
        class_weight: Mapping[int, float] | None = None,
        input_name: str = "input",
        label_name: str | Mapping[str, str] = "label",
    ):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to outputs [batch, …].
          loss: Name of a Keras loss such as "mse", a Keras loss with reduction=None, or a function
            of (labels, outputs) to [batch, …]. With several outputs, a dict from output to loss, or
            a list in the order of the outputs; an output of None, or without a key, needs no label,
            and layers that only it has must not be trainable.
          metrics: Names of Keras metrics such as "accuracy" or "AUC", Keras metrics,
            `ddl.metrics.KerasMetric`, or functions like a loss, named after the function. The state
            of a metric that is no mean over examples must add up. With several outputs, a dict from
            output to such a list.
          loss_weights: Factor of each output's loss, as a dict or list like `loss`; None: 1.
          class_weight: Weight of the entries of each class in the loss, and of metrics in a
            `FunctionOfMean` alone; others weigh 1. Labels are integers [batch, …] or
            [batch, …, 1], or one-hot [batch, …, classes].
          input_name: Name of the input feature; not needed if the data have no other.
          label_name: Name of the label feature; with several outputs, a dict from output to
            feature, where it is not the output's name.

        Raises:
          ConfigError: If the model is no Keras model, a loss or metric is unknown, a loss has a
            reduction, `class_weight` maps no integers, or names of outputs do not fit.
        """
        self._name = type(self).__name__
        checks.check_model(model, self._name)
        self.model = model
        self.input_name = input_name
        self._weight_name = checks.ENTRY_WEIGHT
        self._heads = self._made_heads(loss, metrics, loss_weights, label_name)
        kind = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        if kind.lower().endswith("crossentropy"):
            checks.warn_of_activation(model, getattr(loss, "from_logits", False))
        self._not_inputs = {head.label for head in self._heads.values()}
        self._not_inputs |= {f"{checks.ENTRY_WEIGHT}_{label}" for label in self._not_inputs}
        weights = {} if class_weight is None else class_weight
        if not isinstance(weights, Mapping) or not all(isinstance(x, Integral) for x in weights):
            raise ConfigError(f"{self._name}.class_weight must map integers, got {weights!r:.60}.")
        self._class_weight = dict(weights)
        if self._class_weight and "" not in self._heads:
            raise ConfigError(f"{self._name}.class_weight needs a single loss. Give entry weights.")

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a batch: see `ddl.Task.per_example`. Replica context."""
        return self._per_example(features, self.model(self.inputs(features), training=training))

    def predict(self, features: dict[str, Any]) -> Any:
        """Returns the model's outputs. Labels are not read. Replica context."""
        return self.model(self.inputs(features), training=False)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a label or an input of the model is missing, there is no input, or one has
            another shape or kind than the model or the loss takes. Values are checked where the
            source has them as arrays.
          ConfigError: If a model with one input has several features to choose from.
        """
        for head in self._heads.values():
            if head.label not in source.element_spec:
                raise DataError(
                    f"The data have no feature {head.label!r}, only "
                    f"{', '.join(sorted(source.element_spec))}. Rename it in the data, or set "
                    f"input_name and label_name of {self._name}."
                )
        self.input_name = checks.check_inputs(
            self.model, source, self.input_name, self._not_inputs, self._name
        )
        for head in self._heads.values():
            self._check_label(source, head)

    def _check_label(self, source: Any, head: Head) -> None:
        # A function of the user's may look up text.
        if not (getattr(head.loss, "__module__", None) or "").startswith("keras."):
            return
        spec = source.element_spec[head.label]
        checks.check_label(self, spec, head.label, "numbers", None)
        of_keras = getattr(inspect.unwrap(head.loss), "__self__", None)
        is_sparse = getattr(head.loss, "__name__", "").startswith("sparse_")
        if is_sparse and spec.dtype.is_integer and getattr(of_keras, "ignore_class", None) is None:
            classes = (checks.output_shape(self.model) or (None,))[-1]
            remedy = "Number the classes from 0, or give the model more outputs."
            checks.check_range(source, head.label, classes, "Labels", remedy)

    def inputs(self, features: Mapping[str, Any]) -> Any:
        """Returns what the model takes of a batch, or of its specs: a tensor, or a dict of such."""
        given = checks.inputs_of(self.model, features, self.input_name, self._not_inputs)
        checks.check_not_rounded(self.model, given)
        return given

    def _made_heads(self, loss: Any, metrics: Any, factors: Any, label: Any) -> dict[str, Head]:
        """Returns the heads by the names of the outputs; "" stands for the only one."""
        losses, labels = _by_output(self.model, loss), {} if label == "label" else label
        if not isinstance(losses, Mapping):
            losses, metrics, labels = {"": loss}, {"": metrics}, {"": label}
        losses = {name: one for name, one in losses.items() if one is not None}
        metrics, factors = metrics or {}, _by_output(self.model, factors) or {}
        for what, given in (("metrics", metrics), ("weights", factors), ("labels", labels)):
            if not isinstance(given, Mapping) or not given.keys() <= losses.keys():
                raise ConfigError(
                    f"{what.capitalize()} of {self._name} must be a dict by the outputs with a "
                    f"loss, {', '.join(losses)}, got {given!r:.80}. With one loss, leave it out."
                )
        return {
            name: Head(
                _function(one, "loss")[1],
                _named_metrics(self._name, metrics.get(name, ())),
                labels.get(name, name),
                float(factors.get(name, 1.0)),
            )
            for name, one in losses.items()
        }

    def _per_example(self, features: Mapping[str, Any], outputs: Any) -> PerExample:
        """Returns losses and metrics of the model's outputs."""
        single = "" in self._heads
        named = {"": outputs} if single else _by_output(self.model, outputs)
        given = [named.get(name) if isinstance(named, Mapping) else None for name in self._heads]
        if not all(map(tf.is_tensor, given)):
            got = list(named) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
            raise ConfigError(
                f"{self._name} needs a model with {', '.join(self._heads) or 'one output'}, but "
                f"{self.model.name!r} returns {got}. Give ddl.Supervised losses as a dict by the "
                "keys that the model returns, or by its output_names."
            )
        of_all = self._entry_weights(features, self._weight_name)
        pairs = zip(self._heads.values(), given, strict=True)
        found = [self._weighted(features, head, output, of_all) for head, output in pairs]
        return found[0][0] if single else _joined(self._heads, *zip(*found, strict=True))

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        """Compares an output, in float32 or float64, with its labels."""
        outputs = outputs if outputs.shape.rank > 1 else outputs[:, tf.newaxis]
        if outputs.shape.rank == labels.shape.rank + 1 and outputs.shape[-1] == 1:
            labels = labels[..., tf.newaxis]  # else each label would meet all outputs
        loss = tf.convert_to_tensor(head.loss(labels, outputs))
        metrics = {name: metric(labels, outputs) for name, metric in head.metrics.items()}
        return Compared(loss, metrics, valid_in_loss=getattr(loss, "_keras_mask", None))

    def _weighted(
        self, features: Mapping[str, Any], head: Head, output: tf.Tensor, of_all: tf.Tensor | None
    ) -> tuple[PerExample, list[tf.Tensor]]:
        """Returns the values of an output by example, as means over entries; and its weights."""
        outputs, labels = checks.in_float32(output), features[head.label]
        loss, metrics, valid, valid_in_loss = self._compared(head, labels, outputs)
        mask = getattr(output, "_keras_mask", None)
        own = self._entry_weights(features, f"{checks.ENTRY_WEIGHT}_{head.label}")
        weights = [one for one in (mask, valid, of_all, own) if one is not None]
        alone = [] if valid_in_loss is None else [valid_in_loss]
        if self._class_weight:
            alone.append(_class_weights(labels, outputs, self._class_weight))
        of_metrics = _product(weights)
        of_loss = _product([*weights, *alone]) if alone else of_metrics
        values: dict[str, Value] = {}
        of_rows = tf.ones(loss.shape[:1]) if of_metrics is None and alone else of_metrics
        for name, value in metrics.items():
            if isinstance(value, Inputs):
                values[name] = value if value.weight is not None else value._replace(weight=of_rows)
            elif isinstance(value, OfMean):
                values[name] = value._replace(values=_means(value.values, of_metrics, name))
            else:
                values[name] = _means(value, of_metrics, name)
                if alone:
                    values[name] = WeightedMean()(values[name], _sums(of_rows))
        return PerExample(_means(loss, of_loss, "loss"), values, _sums(of_loss)), weights + alone

    def _entry_weights(self, features: Mapping[str, Any], name: str) -> tf.Tensor | None:
        """Returns the weights of entries in the data, [batch, …], after a check of the values."""
        if name not in features:
            return None
        weight = tf.cast(features[name], tf.float32)
        message = f"Feature {name!r} must hold finite numbers of at least 0"
        return tf.debugging.check_numerics(tf.where(weight < 0, math.nan, weight), message)


class Regression(Supervised):
    """A model from inputs to numbers: `Supervised` with the usual loss and metrics.

    Labels are [batch] or [batch, …], in the shape of the outputs; a last dimension of 1 may be left
    out of labels, and of outputs [batch, 1]. The loss of an example is the mean over its numbers.
    Reports "mean_absolute_error", "mean_squared_error", its root "root_mean_squared_error", and,
    for outputs [batch] or [batch, numbers], "r2", the coefficient of determination over all
    examples, a mean over the numbers.
    """

    def __init__(self, model: keras.Model, *, loss: Any = "mse", **names: Any):
        """Initializes the task.

        Args:
          model: Maps inputs [batch, …] to outputs [batch, …]; a model with several inputs gets a
            dict of the features.
          loss: As of `Supervised`, such as "mae", or "huber": squared up to an error of 1, linear
            beyond (Huber 1964, "Robust Estimation of a Location Parameter").
          names: `input_name` and `label_name`, as of `Supervised`.

        Raises:
          ConfigError: If the model is none, or `loss` is unknown.
        """
        rmse = KerasMetric("RootMeanSquaredError", {"name": "root_mean_squared_error"})
        metrics: list[Any] = ["mean_absolute_error", "mean_squared_error", rmse]
        if len(checks.output_shape(model) or ()) < 2:
            metrics.append(KerasMetric("R2Score", {"name": "r2"}))
        super().__init__(model, loss, metrics=metrics, **names)


def _by_output(model: keras.Model, given: Any) -> Any:
    """Returns what is given in the order of a functional model's outputs by their names."""
    names = getattr(model, "output_names", None) or ()
    several = [given] if tf.is_tensor(given) else given
    if isinstance(several, list | tuple) and len(several) == len(names):
        if len({*names}) < len(names):  # two outputs of one layer
            raise ConfigError(f"{model.name!r} has outputs of one name, {names}. Return a dict.")
        return dict(zip(names, several, strict=True))
    return given


def _named_metrics(task: str, metrics: Any) -> dict[str, _Function]:
    if isinstance(metrics, str | Mapping):
        raise ConfigError(
            f"{task}.metrics must be a list, got {metrics!r:.80}. Write [{metrics!r:.60}], or give "
            "losses and metrics as dicts by output."
        )
    named = [_function(metric, "metric") for metric in metrics or ()]
    names = [name for name, _ in named]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"{task}.metrics has two metrics with the name {twice[0]!r}. Give one another name: "
            "ddl.metrics.KerasMetric('Precision', {'name': 'precise'})."
        )
    return dict(named)


def _function(given: Any, kind: Literal["loss", "metric"]) -> tuple[str, _Function]:
    """Returns name and function of a loss or metric, by name, of Keras or of the user's."""
    if kind == "metric" and given in ("accuracy", "acc"):
        return "accuracy", _accuracy
    found, known = given, keras.losses if kind == "loss" else keras.metrics
    try:
        if isinstance(given, str):
            found = known.get(given)
    except ValueError:
        found = None
    except TypeError:  # a metric that needs arguments, which `KerasMetric` says
        found = KerasMetric(given)
    name = given if isinstance(given, str) else getattr(found, "name", "")
    if isinstance(found, keras.losses.Loss):
        if found.reduction not in (None, "none"):
            raise ConfigError(
                f"The loss {name!r} must return one value for each example, but it has "
                f"reduction={found.reduction!r}. Create it with reduction=None."
            )
        # Not the loss itself, which would drop the mask of `ignore_class` and cast to floatx.
        return name, _checked(found.call, getattr(found, "fn", None), kind)
    if isinstance(found, mean := keras.metrics.MeanMetricWrapper) and all(
        getattr(type(found), name) is getattr(mean, name) for name in ("update_state", "result")
    ):
        return name, functools.partial(_checked(found._fn, found._fn, kind), **found._fn_kwargs)
    if isinstance(found, keras.metrics.Metric):
        found = KerasMetric(given)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"Supervised takes a {kind} of Keras, its name, such as 'mse', or a function of "
            f"(labels, outputs), got {given!r:.80}.{did_you_mean(str(given), dir(known))} Correct "
            "the name, or call the class."
        )
    return name or getattr(found, "__name__", type(found).__name__), _checked(found, found, kind)


def _checked(function: Any, named: Any, kind: str) -> _Function:
    """Returns a loss or metric of Keras's, by entries, that refuses outputs of another shape.

    Keras would broadcast: it would compare labels [batch, 2] with the one output of each example.
    """
    name, module = getattr(named, "__name__", ""), getattr(named, "__module__", None) or ""
    if name == "ctc" and module.startswith("keras."):
        return functools.update_wrapper(functools.partial(_of_any_size, function), function)
    if name.startswith(_OF_OTHER_SHAPES) or not module.startswith("keras."):
        return function

    is_sparse = name.startswith("sparse_")
    other = name.removeprefix("sparse_") if is_sparse else f"sparse_{name}"
    form, axis = ("one-hot", ", and a last axis of classes") if is_sparse else ("integer", "")
    remedy = f" For {form} labels, use {other!r}." if hasattr(keras.metrics, other) else ""

    @functools.wraps(function, updated=())
    def checked(labels: Any, outputs: Any, **arguments: Any) -> Any:
        given, wanted = labels.shape[1:], outputs.shape[1 : -1 if is_sparse else None]
        forms = [given, checks.without_one(given)] if is_sparse else [given]
        if not any(map(wanted.is_compatible_with, forms)):
            raise ConfigError(
                f"The {kind} {name!r} needs outputs in the shape of the labels{axis}, got "
                f"outputs {tuple(outputs.shape)} for labels {tuple(labels.shape)}. Change the "
                f"model's last layer, or the labels.{remedy}"
            )
        return function(labels, outputs, **arguments)

    checked.__name__ = name
    return checked


def _of_any_size(function: _Function, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Calls a loss of loops that TensorFlow names alike for all batches, whose size it hides.

    Else TensorFlow reports "error: 'tfg.While' op …" for each further size in one process.
    """
    size = tf.raw_ops.PlaceholderWithDefault(input=tf.shape(outputs)[0], shape=[])
    return tf.ensure_shape(function(labels[:size], outputs[:size]), outputs.shape[:1])


def _accuracy(labels: Any, outputs: Any) -> Any:
    """Chooses the accuracy by the shapes, as Keras does."""
    if outputs.shape[-1] == 1:
        function: _Function = keras.metrics.binary_accuracy
        return _checked(function, function, "metric")(labels, outputs)
    if labels.shape.rank < outputs.shape.rank or labels.shape[-1] == 1:
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)
    return keras.metrics.categorical_accuracy(labels, outputs)


def _class_weights(labels: tf.Tensor, outputs: tf.Tensor, given: Mapping[int, float]) -> tf.Tensor:
    """Returns the weight of each entry: float32 [batch, …]."""
    if labels.shape.rank > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    elif 1 < labels.shape.rank == outputs.shape.rank:  # one-hot
        labels = tf.argmax(tf.cast(labels, tf.float32), axis=-1)
    found = tf.ones(tf.shape(labels))
    for number, weight in given.items():
        found = tf.where(tf.cast(labels, tf.float64) == number, float(weight), found)
    return found


def _product(factors: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the product of weights [batch, …] whose shapes agree from the left."""
    rank = max((one.shape.rank for one in factors), default=0)
    ranked = [with_rank(tf.cast(one, tf.float32), rank) for one in factors]
    return functools.reduce(tf.multiply, ranked) if ranked else None


def _sums(weight: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the sum of the weights of each example, [batch]."""
    if weight is None or weight.shape.rank == 1:
        return weight
    return tf.reduce_sum(weight, list(range(1, weight.shape.rank)))


def _means(values: Any, weight: tf.Tensor | None, name: str) -> tf.Tensor:
    """Returns the weighted mean of the entries of each example: [batch]."""
    values = tf.convert_to_tensor(values)
    rank, of_weight = values.shape.rank, 1 if weight is None else weight.shape.rank
    if name != "loss" and (rank > 1 or not values.dtype.is_floating):
        values = tf.cast(values, tf.float64)  # in float32, 2/3 would be exact to eight digits
    if weight is not None and not broadcasts(weight.shape, values.shape):
        raise ConfigError(
            f"The {name} of Supervised has shape {tuple(values.shape)}, which the weights of "
            f"entries, {tuple(weight.shape)}, do not fit: they are of a mask, of (x, y, weight) or "
            "of classes. Return one value for each entry."
        )
    if rank > of_weight:
        values = tf.reduce_mean(values, list(range(of_weight, rank)))
    if of_weight == 1:
        return values
    weight = tf.broadcast_to(tf.cast(weight, values.dtype), tf.shape(values))
    return tf.math.divide_no_nan(_sums(tf.math.multiply_no_nan(values, weight)), _sums(weight))


def _joined(
    heads: Mapping[str, Head], parts: Sequence[PerExample], factors: Sequence[list[tf.Tensor]]
) -> PerExample:
    """Returns the sum of the losses of several outputs, each a mean by weights of its own."""
    alike, dtype = len({tuple(map(id, one)) for one in factors}) == 1, parts[0].loss.dtype
    losses = [tf.cast(one.loss, dtype) for one in parts]
    ones = tf.ones_like(losses[0])
    weights = [ones if one.weight is None else tf.cast(one.weight, dtype) for one in parts]
    metrics: dict[str, Value] = {}
    for name, part, weight in zip(heads, parts, weights, strict=True):
        for metric, value in {"loss": part.loss, **part.metrics}.items():
            is_mean = tf.is_tensor(value) and not alike
            metrics[f"{name}_{metric}"] = WeightedMean()(value, weight) if is_mean else value
    if not alike:
        # Each loss has its own denominator: Σ weight of its entries over the global batch.
        of_data = tf.cast(current_batch().weight, dtype)
        every = gather(tf.stack([of_data, *(of_data * weight for weight in weights)], axis=1))
        kept = tf.where(every.mask[:, tf.newaxis], every.rows, tf.zeros([], dtype))
        examples, *sums = tf.unstack(tf.reduce_sum(kept, axis=0))
        shares = [tf.math.divide_no_nan(examples, own) for own in sums]
        losses = [x * y * z for x, y, z in zip(losses, weights, shares, strict=True)]
    total = tf.add_n([head.factor * x for head, x in zip(heads.values(), losses, strict=True)])
    return PerExample(total, metrics, parts[0].weight if alike else None)
