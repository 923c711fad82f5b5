"""Bidirectional transformers for masked language models."""

import keras

from ddl import layers
from ddl.errors import ConfigError

_EPSILON = 1e-12


def bert(
    vocabulary: int,
    positions: int,
    *,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    dropout: float = 0.1,
    packed: bool = False,
) -> keras.Model:
    """Builds an encoder of tokens: Devlin et al. 2019, "BERT: Pre-training of Deep ...".

    The defaults are those of BERT-base, which has 30,522 tokens and 512 positions. There are
    neither vectors of sentence A and B nor a prediction of the next sentence (Liu et al. 2019,
    "RoBERTa"). As in the paper, each branch is normalized after it is added. The logits share the
    table of token vectors.

    Args:
      vocabulary: Number of tokens, with the mask token: 257 for bytes and a mask.
      positions: Length of a sequence; with `packed`, of the longest document.
      width: Width of the vectors.
      heads: Attention heads, a divisor of `width`.
      blocks: Number of blocks.
      dropout: Dropout rate of the vectors, of the attention and of each branch.
      packed: Whether the model takes documents of varying length, such as the rows of
        `ddl.data.packed`: a dict of "token", "segment" and "position", each int64 [batch, length]
        of any length. A token then attends to those of its own document.

    Returns:
      A model from tokens, int64 [batch, positions], to logits [batch, positions, vocabulary]. The
      logits at a position depend on all tokens.

    Raises:
      ConfigError: If `heads` does not divide `width`, or a size is below 1.
    """
    sizes = {"vocabulary": vocabulary, "positions": positions, "blocks": blocks, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"bert.{name} must be at least 1, got {size}.")
    if width % heads:
        raise ConfigError(
            f"bert.heads must divide bert.width, got {heads} heads for a width of {width}. Change "
            "one of them."
        )
    length = None if packed else positions
    token = keras.Input((length,), dtype="int64", name="token")
    table = layers.TiedEmbedding(
        vocabulary, width, logit_bias=True, embeddings_initializer=_normal(), name="token_vectors"
    )
    inputs, mask = token, None
    if packed:
        segment, position = (
            keras.Input((length,), dtype="int64", name=name) for name in ("segment", "position")
        )
        inputs = {"token": token, "segment": segment, "position": position}
        mask = keras.ops.equal(segment[:, :, None], segment[:, None, :])
        vectors = keras.layers.Embedding(
            positions, width, embeddings_initializer=_normal(), name="positions"
        )
        x = keras.layers.Add(name="placed")([table(token), vectors(position)])
    else:
        x = layers.PositionEmbedding(_normal(), name="positions")(table(token))
    x = keras.layers.LayerNormalization(epsilon=_EPSILON, name="norm")(x)
    x = keras.layers.Dropout(dropout, name="dropout")(x)
    for number in range(1, blocks + 1):
        x = _block(x, heads, dropout, f"block_{number}", mask)
    x = keras.layers.Dense(width, "gelu", kernel_initializer=_normal(), name="head")(x)
    x = keras.layers.LayerNormalization(epsilon=_EPSILON, name="head_norm")(x)
    return keras.Model(inputs, table(x, as_logits=True), name="bert")


def _block(
    x: keras.KerasTensor,
    heads: int,
    dropout: float,
    name: str,
    mask: keras.KerasTensor | None,
) -> keras.KerasTensor:
    """Adds attention and a perceptron, each normalized last, to x [batch, positions, width]."""
    width = x.shape[-1]

    def added(x: keras.KerasTensor, branch: keras.KerasTensor, part: str) -> keras.KerasTensor:
        branch = keras.layers.Dropout(dropout, name=f"{name}_{part}_dropout")(branch)
        x = keras.layers.Add(name=f"{name}_{part}_add")([x, branch])
        return keras.layers.LayerNormalization(epsilon=_EPSILON, name=f"{name}_{part}_norm")(x)

    attention = keras.layers.MultiHeadAttention(
        heads,
        width // heads,
        dropout=dropout,
        kernel_initializer=_normal(),
        name=f"{name}_attention",
    )
    x = added(x, attention(x, x, attention_mask=mask), "attention")
    hidden = keras.layers.Dense(
        4 * width, "gelu", kernel_initializer=_normal(), name=f"{name}_hidden"
    )(x)
    out = keras.layers.Dense(width, kernel_initializer=_normal(), name=f"{name}_hidden_out")(hidden)
    return added(x, out, "hidden")


def _normal() -> keras.initializers.Initializer:
    """Returns a new initializer: one of Keras gives the same numbers at each call."""
    return keras.initializers.TruncatedNormal(stddev=0.02)
