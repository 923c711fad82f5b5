"""Masking of tokens for masked language models, by position in the global batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError

register = keras.saving.register_keras_serializable("ddl")

_LARGEST_VOCABULARY = 2**23
"""Numbers that a uniform float32 can tell apart."""


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
        masked: float = 0.8,
        randomized: float = 0.1,
        kept_tokens: Sequence[int] = (),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          mask_token: Token that replaces others.
          vocabulary_size: Random tokens are from 0 to vocabulary_size - 1; at most 2²³.
          rate: Part of the tokens that are selected.
          masked: Part of the selected tokens that become the mask token.
          randomized: Part of the selected tokens that become a random token.
          kept_tokens: Tokens that are never selected, such as padding and separators.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
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
        if masked < 0 or randomized < 0 or masked + randomized > 1 + 1e-9:
            raise ConfigError(
                "TokenMasking.masked and randomized must be at least 0 and at most 1 in sum, got "
                f"{masked} and {randomized}."
            )
        self.mask_token = mask_token
        self.vocabulary_size = vocabulary_size
        self.rate = rate
        self.masked = masked
        self.randomized = randomized
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
        becomes_mask = kind < self.rate * self.masked
        becomes_random = kind < self.rate * (self.masked + self.randomized)
        replacement = tf.where(becomes_random, random, token)
        replacement = tf.where(becomes_mask, tf.constant(self.mask_token, token.dtype), replacement)
        return MaskedTokens(tf.where(selected, replacement, token), tf.cast(selected, tf.float32))
