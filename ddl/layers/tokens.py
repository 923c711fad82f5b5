"""Layers of tokens: their vectors, their logits, and their masking for language models."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError
from ddl.layers.lookups import as_ids

register = keras.saving.register_keras_serializable("ddl")

_LARGEST_VOCABULARY = 2**23
"""Numbers that a uniform float32 can tell apart."""

_MASKED, _RANDOMIZED = 0.8, 0.1  # parts of the selected tokens


@register
class TiedEmbedding(keras.layers.Embedding):
    """A table of token vectors that also gives the logits of tokens.

    Press and Wolf 2017, "Using the Output Embedding to Improve Language Models".
    """

    def __init__(self, input_dim: int, output_dim: int, logit_bias: bool = False, **arguments: Any):
        """Initializes the layer.

        Args:
          input_dim: Number of tokens.
          output_dim: Width of the vectors.
          logit_bias: Whether to add a learned number for each token to the logits, as in BERT.
          **arguments: Those of `keras.layers.Embedding`.
        """
        super().__init__(input_dim, output_dim, **arguments)
        self.logit_bias = logit_bias

    def build(self, input_shape: Any = None) -> None:
        """Creates the table and the bias."""
        super().build(input_shape)
        if self.logit_bias:
            self.bias = self.add_weight(shape=(self.input_dim,), initializer="zeros", name="bias")

    def call(self, inputs: tf.Tensor, as_logits: bool = False) -> tf.Tensor:
        """Looks up tokens, or multiplies vectors by the table.

        Args:
          inputs: Tokens, integer [batch, …]; with `as_logits` vectors, float [batch, …, width].
          as_logits: Whether to return logits.

        Returns:
          Vectors [batch, …, width], or logits [batch, …, tokens].
        """
        if not as_logits:
            return super().call(as_ids(inputs))
        table = tf.cast(self.embeddings, self.compute_dtype)
        # Not an einsum: its gradient for the table would hold a table for each position.
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        logits = tf.matmul(rows, table, transpose_b=True)
        if self.logit_bias:
            logits += tf.cast(self.bias, logits.dtype)
        return tf.reshape(logits, [*keras.ops.shape(inputs)[:-1], self.input_dim])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return super().get_config() | {"logit_bias": self.logit_bias}

    def compute_output_shape(self, input_shape: Any, as_logits: bool = False) -> Any:
        """Returns the shape of the output."""
        if as_logits:
            return (*input_shape[:-1], self.input_dim)
        return super().compute_output_shape(input_shape)

    def compute_output_spec(self, inputs: Any, as_logits: bool = False) -> keras.KerasTensor:
        """Returns shape and dtype of the output."""
        shape = self.compute_output_shape(inputs.shape, as_logits)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)


@register
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector to each position of a sequence."""

    def __init__(self, initializer: Any = "uniform", **arguments: Any):
        """Initializes the layer.

        Args:
          initializer: Keras initializer of the vectors.
          **arguments: Those of `keras.layers.Layer`.
        """
        super().__init__(**arguments)
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape: Any) -> None:
        """Creates the vectors, [positions, width]."""
        self.table = self.add_weight(
            shape=input_shape[1:], initializer=self.initializer, name="table"
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Adds the vectors to inputs, float [batch, positions, width]."""
        return inputs + tf.cast(self.table, inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        initializer = keras.initializers.serialize(self.initializer)
        return super().get_config() | {"initializer": initializer}


class MaskedTokens(NamedTuple):
    """Tokens to give to a model, and which of the original ones it must predict.

    Attributes:
      token: [batch, tokens], in the dtype of the given tokens.
      weight: float32 [batch, tokens], 1 for tokens to predict, else 0. An example may have none.
    """

    token: tf.Tensor
    weight: tf.Tensor


@register
class TokenMasking(keras.layers.Layer):
    """Selects tokens to predict, and replaces most of them.

    Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
    Understanding", section 3.1. 15% of the tokens are selected: 80% of these become the mask
    token, 10% a random token, and 10% stay. Each token is selected independently. Training and
    evaluation both mask, with draws of their own; each evaluation repeats its draws.
    """

    def __init__(
        self,
        mask_token: int,
        vocabulary_size: int,
        rate: float = 0.15,
        kept_tokens: Sequence[int] = (),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          mask_token: Token that replaces others.
          vocabulary_size: Random tokens are from 0 to vocabulary_size - 1; at most 2²³.
          rate: Part of the tokens that are selected.
          kept_tokens: Tokens that are never selected, such as padding and separators.
          seed: Seed of the draws; None takes that of the trainer.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If an argument is out of range.
        """
        super().__init__(autocast=False, **kwargs)
        if not 1 <= vocabulary_size <= _LARGEST_VOCABULARY or mask_token < 0:
            raise ConfigError(
                "TokenMasking.vocabulary_size must be from 1 to 2^23 and mask_token at least 0, "
                f"got {vocabulary_size} and {mask_token}."
            )
        if not 0 < rate <= 1:
            raise ConfigError(f"TokenMasking.rate must be above 0 and at most 1, got {rate}.")
        self.mask_token = mask_token
        self.vocabulary_size = vocabulary_size
        self.rate = rate
        self.kept_tokens = tuple(kept_tokens)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, token: tf.Tensor, can_mask: tf.Tensor | None = None) -> MaskedTokens:
        """Masks tokens [batch, tokens] of an integer dtype. Replica context.

        Args:
          token: The tokens.
          can_mask: bool [batch, tokens], False for tokens that are never selected, such as
            `segment > 0` of packed rows; None: all others than `kept_tokens`.
        """
        if not token.dtype.is_integer:
            raise ConfigError(
                f"TokenMasking takes integer tokens, got {token.dtype.name}. Convert the tokens in "
                "the data, or by tf.cast(token, tf.int64)."
            )
        drawn = ddl.random.uniform(self, [*keras.ops.shape(token), 2])
        kind, which = tf.unstack(drawn, axis=-1)
        selected = kind < self.rate
        for kept in self.kept_tokens:
            selected &= token != tf.constant(kept, token.dtype)
        if can_mask is not None:
            selected &= can_mask
        random = tf.cast(tf.floor(which * self.vocabulary_size), token.dtype)
        becomes_mask = kind < self.rate * _MASKED
        becomes_random = kind < self.rate * (_MASKED + _RANDOMIZED)
        replacement = tf.where(becomes_random, random, token)
        replacement = tf.where(becomes_mask, tf.constant(self.mask_token, token.dtype), replacement)
        return MaskedTokens(tf.where(selected, replacement, token), tf.cast(selected, tf.float32))
