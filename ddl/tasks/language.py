"""Language models: the token that follows, or tokens that were masked."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.layers.tokens import TokenMasking
from ddl.metrics.means import Perplexity
from ddl.tasks.checks import check_range, output_shape
from ddl.tasks.classification import Classification
from ddl.tasks.supervised import Compared, Head
from ddl.tasks.task import PerExample


class LanguageModel(Classification):
    """A model from tokens to logits of a token at each position, such as `ddl.models.gpt`.

    The loss is the cross-entropy in nats: the mean over all tokens of the global batch, weighted by
    the feature "token_weight" [positions] where the data have it. The label of a position is the
    token that follows, as `ddl.data.tokens` gives them; `MaskedLanguageModel` predicts masked
    tokens. Reports "accuracy" and "perplexity".
    """

    _remedy = (
        "Set the model's vocabulary to a number above the largest token, replace negative tokens, "
        "and turn text into numbers in the data, as ddl.data.tokens does."
    )

    def __init__(
        self, model: keras.Model, *, input_name: str = "token", label_name: str = "next_token"
    ):
        """Initializes the task.

        Args:
          model: Maps tokens, integer [batch, positions], to logits [batch, positions, vocabulary].
            A model with several inputs gets a dict of the features that it names.
          input_name: Name of the feature of tokens.
          label_name: Name of the feature of labels.

        Raises:
          ConfigError: If the model is none.
        """
        super().__init__(model, input_name=input_name, label_name=label_name)
        self._weight_name = "token_weight"

    def _compared(self, head: Head, labels: tf.Tensor, outputs: tf.Tensor) -> Compared:
        found = super()._compared(head, labels, outputs)
        found.metrics["perplexity"] = Perplexity()(found.loss)
        return found

    def check(self, source: Any) -> None:
        """Checks a data source before training.

        Raises:
          DataError: If a feature is missing, tokens are no integers or have another length than the
            model, or the data have several documents in a row, or padding, and the model takes no
            "segment". Tokens beyond the vocabulary are found where
            the source has them as arrays.
        """
        super().check(source)
        spec, given = source.element_spec, self.inputs(source.element_spec)
        if "segment" in spec and not (isinstance(given, Mapping) and "segment" in given):
            raise DataError(
                "The data have padding or several documents in a row (feature 'segment'), but the "
                f"model {self.model.name!r} takes no 'segment', so that tokens would attend to "
                "them. Build it with packed=True, or write a model that takes a dict of features."
            )
        read = {"length", "segment", self._weight_name} & {*spec}
        if read == {"length"} and not (isinstance(given, Mapping) and "length" in given):
            raise DataError(
                f"The data have the feature 'length', which {self._name} does not read, so padding "
                f"would count as tokens. Give 'segment' or {self._weight_name!r}, 0 for padding "
                "(ddl.data.packed with alone=True makes both)."
            )
        vocabulary = (output_shape(self.model) or (None,))[-1]
        check_range(source, self.input_name, vocabulary, "Tokens", self._remedy)


class MaskedLanguageModel(LanguageModel):
    """A bidirectional model, such as `ddl.models.bert`, that predicts masked tokens.

    Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
    Understanding". `masking` selects tokens by their position in the global batch, so that the same
    ones are masked on any number of devices. The loss is the cross-entropy in nats: the mean over
    the masked tokens of the global batch.

    A feature "mask_weight" [positions] weighs the tokens; those of weight 0 are never masked, and
    neither is padding. The data tell it by "segment", which is 0 there (`ddl.data.packed`).
    The model must then take "segment".
    """

    def __init__(self, model: keras.Model, masking: TokenMasking, *, input_name: str = "token"):
        """Initializes the task.

        Args:
          model: Maps tokens, integer [batch, positions], to logits [batch, positions, vocabulary].
            A model with several inputs gets a dict of the features that it names.
          masking: Selects and replaces tokens, in training and in evaluations.
          input_name: Name of the feature of tokens.

        Raises:
          ConfigError: If the model is none, or the masking has tokens beyond its vocabulary.
        """
        super().__init__(model, input_name=input_name, label_name=input_name)
        self._weight_name = "mask_weight"
        self._not_inputs = {self._weight_name}
        vocabulary = (output_shape(model) or (None,))[-1]
        largest = max(masking.mask_token, masking.vocabulary_size - 1)
        if vocabulary is not None and largest >= vocabulary:
            raise ConfigError(
                f"The vocabulary of {model.name!r} must be at least {largest + 1}, as TokenMasking "
                f"draws tokens up to {largest}, but its logits have {vocabulary}. Set it."
            )
        self.masking = masking

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Masks tokens and computes loss and metrics of the masked ones. Replica context.

        Args:
          features: Tokens, integer [batch, positions]; the features that tell padding, and weights,
            if there are any.
          training: Whether to run the model in training mode.

        Returns:
          The loss of each example, the metrics "accuracy" and "perplexity", and the weight: the sum
          over its masked tokens of 1, or their weight in the data.
        """
        token, given = features[self.input_name], self._entry_weights(features, self._weight_name)
        can_mask = features["segment"] > 0 if "segment" in features else None
        if given is not None:
            can_mask = given > 0 if can_mask is None else can_mask & (given > 0)
        masked = self.masking(token, can_mask=can_mask)
        weight = masked.weight if given is None else masked.weight * given
        inputs = self.inputs({**features, self.input_name: masked.token})
        logits = self.model(inputs, training=training)
        return self._per_example({self.input_name: token, self._weight_name: weight}, logits)
