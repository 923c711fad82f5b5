"""Language models: the token that follows, or tokens that were masked."""

from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.metrics.of_mean import Perplexity
from ddl.tasks.accuracy import accuracy
from ddl.tasks.checks import (
    check_features,
    check_model,
    check_range,
    fits,
    in_float32,
    output_shape,
)
from ddl.tasks.cross_entropy import cross_entropy
from ddl.tasks.inputs import check_inputs, inputs_of
from ddl.tasks.task import PerExample


class LanguageModel:
    """A model from tokens to logits of a token at each position, such as `ddl.models.gpt`.

    The loss is the cross-entropy in nats: the mean over all tokens of the global batch, weighted by
    the feature of `weight_name` where the data have it. For a causal model the label of a position
    is the token that follows, as `ddl.data.token_windows` gives them. For a masked model (Devlin et
    al. 2019, "BERT") it is the token that was masked, and all other positions weigh 0.
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
        check_model(model, "LanguageModel")
        shape = output_shape(model)
        if shape is not None and len(shape) != 2:
            raise ConfigError(
                "LanguageModel needs a model with logits [batch, positions, vocabulary], but "
                f"{model.name!r} returns {(None, *shape)}. Return the logits of all positions, as "
                "ddl.models.gpt does."
            )
        self.model = model
        self._perplexity = Perplexity()
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
        logits = in_float32(self.model(self._inputs(features), training=training))
        shape = tf.shape(labels)
        rows = tf.reshape(logits, [-1, logits.shape[-1]])
        classes = tf.reshape(labels, [-1])
        loss = tf.reshape(cross_entropy(classes, rows), shape)
        return PerExample(
            loss,
            {
                "accuracy": tf.reshape(accuracy(classes, rows), shape),
                "perplexity": self._perplexity(loss),
            },
            features.get(self._weight_name),
        )

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
        for name in names.values():
            if not spec[name].dtype.is_integer:
                raise DataError(
                    f"Feature {name!r} must be integers, the numbers of tokens, got "
                    f"{spec[name].dtype.name}. Turn text into numbers in the data, as "
                    "ddl.data.token_windows does."
                )
        tokens = tuple(spec[self._input_name].shape)
        for name in {self._label_name, self._weight_name} & spec.keys():
            if not fits(tokens, tuple(spec[name].shape)):
                raise DataError(
                    f"Feature {name!r} must have a value for each token, shape {tokens}, got "
                    f"{tuple(spec[name].shape)}. Reshape it in the data."
                )
        shape = output_shape(self.model)
        end = None if shape is None else shape[-1]
        for name in names.values():
            remedy = "Set the model's vocabulary to a number above the largest token."
            check_range(source, name, end, f"Tokens (feature {name!r})", remedy)
