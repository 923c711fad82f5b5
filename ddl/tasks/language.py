"""Language models: the token that follows, or tokens that were masked."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.layers.transforms.token_masking import TokenMasking
from ddl.metrics.of_mean import Perplexity
from ddl.tasks.accuracy import accuracy
from ddl.tasks.checks import (
    check_features,
    check_model,
    check_range,
    fits,
    one_output,
    output_shape,
)
from ddl.tasks.cross_entropy import cross_entropy
from ddl.tasks.inputs import check_inputs, inputs_of
from ddl.tasks.task import PerExample


class LanguageModel:
    """A model from tokens to logits of a token at each position, such as `ddl.models.gpt`.

    The loss is the cross-entropy in nats: the mean over all tokens of the global batch, weighted by
    the feature of `weight_name` where the data have it. The label of a position is the token that
    follows, as `ddl.data.tokens` gives them; `MaskedLanguageModel` predicts masked tokens.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        input_name: str = "token",
        label_name: str = "next_token",
        weight_name: str = "token_weight",
    ):
        """Initializes the task.

        Args:
          model: Maps tokens, integer [batch, positions], to logits [batch, positions, vocabulary].
            A model with several inputs gets a dict of the features that it names.
          input_name: Name of the feature of tokens.
          label_name: Name of the feature of labels.
          weight_name: Name of a feature of weights [positions], such as a mask of real tokens. The
            data need not have it.

        Raises:
          ConfigError: If the model is none, or its output has another rank.
        """
        _check_logits(model, "LanguageModel", "gpt")
        self.model = model
        self._input_name = input_name
        self._label_name = label_name
        self._weight_name = weight_name

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes loss and metrics of each token. Replica context.

        Args:
          features: Tokens and labels, integer [batch, positions]; weights, if there are any.
          training: Whether to run the model in training mode.

        Returns:
          The loss [batch, positions], the metrics "accuracy" and "perplexity", and the weight.
        """
        labels = tf.cast(features[self._label_name], tf.int64)
        logits = self.model(self._inputs(features), training=training)
        return _compared(self, labels, logits, features.get(self._weight_name))

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the logits [batch, positions, vocabulary]. Labels are not read."""
        return self.model(self._inputs(features), training=False)

    def _inputs(self, features: dict[str, Any]) -> Any:
        return inputs_of(self.model, features, self._input_name, self._label_name)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a feature is missing, tokens are no integers or have another length than the
            model, or labels and weights another shape. Tokens beyond the vocabulary are found
            where the source has them as arrays.
        """
        spec = source.element_spec
        names = {"input_name": self._input_name, "label_name": self._label_name}
        check_features(spec, names, "LanguageModel")
        check_inputs(self.model, spec, self._input_name, self._label_name, "LanguageModel")
        given = inputs_of(self.model, spec, self._input_name, self._label_name)
        if "segment" in spec and not (isinstance(given, dict) and "segment" in given):
            raise DataError(
                "The data have several documents in a row (feature 'segment'), but the model "
                f"{self.model.name!r} takes no 'segment', so that tokens would attend to other "
                "documents. Build it with gpt(…, packed=True), or write a model that takes a dict "
                "of the features."
            )
        _check_tokens(self.model, source, tuple(names.values()), (self._weight_name,))


class MaskedLanguageModel:
    """A bidirectional model, such as `ddl.models.bert`, that predicts masked tokens.

    Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
    Understanding". `masking` selects tokens by their position in the global batch, so that the same
    ones are masked on any number of devices. The loss is the cross-entropy in nats: the mean over
    the masked tokens of the global batch.

    Padding is never masked. The data tell it by "segment", which is 0 there (`ddl.data.packed`), or
    by "length" (`ddl.data.token_lines`); the model must then take "segment".
    """

    def __init__(
        self,
        model: keras.Model,
        masking: TokenMasking,
        *,
        input_name: str = "token",
        weight_name: str = "mask_weight",
    ):
        """Initializes the task.

        Args:
          model: Maps tokens, integer [batch, positions], to logits [batch, positions, vocabulary].
            A model with several inputs gets a dict of the features that it names.
          masking: Selects and replaces tokens, in training and in evaluations.
          input_name: Name of the feature of tokens.
          weight_name: Name of a feature of weights [positions] of the tokens if they are masked;
            tokens of weight 0 are never masked. The data need not have it.

        Raises:
          ConfigError: If the model is none, its output has another rank, or the masking is none or
            has tokens beyond the model's vocabulary.
        """
        _check_logits(model, "MaskedLanguageModel", "bert")
        if not isinstance(masking, TokenMasking):
            raise ConfigError(
                "MaskedLanguageModel.masking must be a ddl.layers.TokenMasking, got "
                f"{masking!r:.60}. Pass an instance; in a config, write @TokenMasking() with "
                "parentheses."
            )
        shape = output_shape(model)
        largest = max(masking.mask_token, masking.vocabulary_size - 1)
        if shape is not None and shape[-1] is not None and largest >= shape[-1]:
            raise ConfigError(
                f"The vocabulary of {model.name!r} must be at least {largest + 1}, since "
                f"TokenMasking has mask_token = {masking.mask_token} and vocabulary_size = "
                f"{masking.vocabulary_size}, but its logits have {shape[-1]}. Set the model's "
                "vocabulary."
            )
        self.model = model
        self.masking = masking
        self._input_name = input_name
        self._weight_name = weight_name

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Masks tokens and computes loss and metrics of the masked ones. Replica context.

        Args:
          features: Tokens, integer [batch, positions]; the features that tell padding, and weights,
            if there are any.
          training: Whether to run the model in training mode.

        Returns:
          The loss [batch, positions], the metrics "accuracy" and "perplexity", and the weight: 1
          for masked tokens, or their weight in the data, and 0 for all others.
        """
        features = _with_segments(features, self._input_name)
        token, given = features[self._input_name], features.get(self._weight_name)
        can_mask = features["segment"] > 0 if "segment" in features else None
        if given is not None:
            counts = tf.cast(given, tf.float32) > 0
            can_mask = counts if can_mask is None else can_mask & counts
        masked = self.masking(token, can_mask=can_mask)
        inputs = self._inputs({**features, self._input_name: masked.token})
        weight = masked.weight
        if given is not None:
            weight *= tf.cast(given, weight.dtype)
        logits = self.model(inputs, training=training)
        return _compared(self, tf.cast(token, tf.int64), logits, weight)

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the logits [batch, positions, vocabulary] of tokens that are not masked here."""
        return self.model(self._inputs(_with_segments(features, self._input_name)), training=False)

    def _inputs(self, features: dict[str, Any]) -> Any:
        return inputs_of(self.model, features, self._input_name, self._weight_name)

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If the tokens are missing, no integers or of another length than the model, if
            weights have another shape, or if the data have padding and the model takes no
            "segment". Tokens beyond the vocabulary are found where the source has them as arrays.
        """
        spec = dict(source.element_spec)
        check_features(spec, {"input_name": self._input_name}, "MaskedLanguageModel")
        token = spec[self._input_name]
        if "segment" not in spec and "length" in spec:
            length = spec["length"]
            if length.shape.rank != 0 or not length.dtype.is_integer:
                raise DataError(
                    "Feature 'length' must be an integer for each example, the number of its "
                    f"tokens, got {length.dtype.name} of shape {tuple(length.shape)}. Convert it, "
                    "or rename a feature of another meaning."
                )
            spec |= dict.fromkeys(("segment", "position"), tf.TensorSpec(token.shape, tf.int64))
        check_inputs(self.model, spec, self._input_name, "", "MaskedLanguageModel")
        given = inputs_of(self.model, spec, self._input_name, "")
        if "segment" in spec and not (isinstance(given, dict) and "segment" in given):
            raise DataError(
                "The data have padding or several documents in a row, but the model "
                f"{self.model.name!r} takes no 'segment', so that tokens would attend to padding "
                "and to other documents. Build it with bert(…, packed=True), or write a model that "
                "takes a dict of the features."
            )
        _check_tokens(self.model, source, (self._input_name,), (self._weight_name, "segment"))


def _with_segments(features: dict[str, Any], input_name: str) -> dict[str, Any]:
    """Returns features with "segment" and "position" if they have only the length of a document."""
    if "segment" in features or "length" not in features:
        return features
    token = features[input_name]
    places = tf.range(tf.shape(token)[1], dtype=tf.int64)
    position = tf.broadcast_to(places, tf.shape(token))
    inside = position < tf.cast(features["length"], tf.int64)[:, tf.newaxis]
    return {**features, "segment": tf.cast(inside, tf.int64), "position": position}


def _compared(
    task: LanguageModel | MaskedLanguageModel,
    labels: tf.Tensor,
    outputs: Any,
    weight: tf.Tensor | None,
) -> PerExample:
    """Returns the loss of each token and the metrics."""
    form = "[batch, positions, vocabulary]"
    expected = (labels.shape[1], None)
    logits = one_output(outputs, task.model, type(task).__name__, form, expected)
    shape = tf.shape(labels)
    rows = tf.reshape(logits, [-1, logits.shape[-1]])
    classes = tf.reshape(labels, [-1])
    of_rows = cross_entropy(classes, rows)
    loss = tf.reshape(of_rows, shape)
    metrics = {
        "accuracy": tf.reshape(accuracy(classes, rows, of_rows), shape),
        "perplexity": Perplexity()(loss),
    }
    return PerExample(loss, metrics, weight)


def _check_logits(model: Any, task: str, example: str) -> None:
    """Raises ConfigError if a model does not return logits of each token."""
    check_model(model, task)
    shape = output_shape(model)
    if shape is not None and len(shape) != 2:
        raise ConfigError(
            f"{task} needs a model with logits [batch, positions, vocabulary], but {model.name!r} "
            f"returns {(None, *shape)}. Return the logits of all positions, as "
            f"ddl.models.{example} does."
        )


def _check_tokens(
    model: keras.Model, source: Any, names: Sequence[str], beside: Sequence[str]
) -> None:
    """Raises DataError if features are no tokens of the model.

    Args:
      model: The model.
      source: The source.
      names: The features of tokens, the model's input first.
      beside: Features with one value for each token, which the data need not have.
    """
    spec = source.element_spec
    for name in names:
        if not spec[name].dtype.is_integer:
            raise DataError(
                f"Feature {name!r} must be integers, the numbers of tokens, got "
                f"{spec[name].dtype.name}. Turn text into numbers in the data, as "
                "ddl.data.tokens does."
            )
    tokens = tuple(spec[names[0]].shape)
    for name in sorted({*names[1:], *beside} & spec.keys()):
        if not fits(tokens, tuple(spec[name].shape)):
            raise DataError(
                f"Feature {name!r} must have a value for each token, shape {tokens}, got "
                f"{tuple(spec[name].shape)}. Reshape it in the data."
            )
        if spec[name].dtype == tf.string:
            raise DataError(f"Feature {name!r} must be numbers, got text. Convert it in the data.")
    shape = output_shape(model)
    end = None if shape is None else shape[-1]
    for name in names:
        remedy = (
            "Set the model's vocabulary to a number above the largest token, and replace negative "
            "tokens."
        )
        check_range(source, name, end, f"Tokens (feature {name!r})", remedy)
