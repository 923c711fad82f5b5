"""Transformers for language."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from ddl import layers
from ddl.errors import ConfigError


def gpt(
    vocabulary: int,
    positions: int,
    *,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    dropout: float = 0.1,
    packed: bool = False,
) -> keras.Model:
    """Builds a language model: Radford et al. 2019, "Language Models are Unsupervised ...".

    The defaults are those of GPT-2 small, which has 50,257 tokens and 1,024 positions. The logits
    share the table of token vectors. The last layer of each perceptron is initialized smaller by
    the square root of the number of branches, as in the paper.

    Args:
      vocabulary: Number of tokens; 256 for bytes.
      positions: Length of a sequence.
      width: Width of the vectors.
      heads: Attention heads, a divisor of `width`.
      blocks: Number of blocks.
      dropout: Dropout rate of the vectors, of the attention and of each branch.
      packed: Whether the model takes rows of several documents, as `ddl.data.packed` makes them: a
        dict of "token", "segment" and "position", each int64 [batch, positions]. A token then
        attends to those of its own document.

    Returns:
      A model from tokens, int64 [batch, positions], to logits [batch, positions, vocabulary]. The
      logits at a position depend on tokens up to it.

    Raises:
      ConfigError: If `heads` does not divide `width`, or a size is below 1.
    """
    _check("gpt", width, heads=heads, vocabulary=vocabulary, positions=positions, blocks=blocks)
    # A clone for each layer: an initializer of Keras gives the same numbers at each call.
    normal = keras.initializers.RandomNormal(stddev=0.02)
    last = keras.initializers.RandomNormal(stddev=0.02 / (2 * blocks) ** 0.5)
    table = layers.TiedEmbedding(
        vocabulary, width, embeddings_initializer=normal, name="token_vectors"
    )
    inputs, x, mask = _embedded(table, positions, positions, packed)
    x = keras.layers.Dropout(dropout, name="dropout")(x)
    block = _Block(heads, dropout, 1e-5, normal, last, causal=True, mask=mask)
    for number in range(1, blocks + 1):
        x = block.add(x, f"block_{number}")
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(inputs, table(x, as_logits=True), name="gpt")


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
    _check("bert", width, heads=heads, vocabulary=vocabulary, positions=positions, blocks=blocks)
    normal = keras.initializers.TruncatedNormal(stddev=0.02)
    table = layers.TiedEmbedding(
        vocabulary, width, logit_bias=True, embeddings_initializer=normal, name="token_vectors"
    )
    inputs, x, mask = _embedded(table, positions, None if packed else positions, packed)
    x = keras.layers.LayerNormalization(epsilon=1e-12, name="norm")(x)
    x = keras.layers.Dropout(dropout, name="dropout")(x)
    block = _Block(heads, dropout, 1e-12, normal, normal, normalizes_first=False, mask=mask)
    for number in range(1, blocks + 1):
        x = block.add(x, f"block_{number}")
    x = keras.layers.Dense(width, "gelu", kernel_initializer=normal.clone(), name="head")(x)
    x = keras.layers.LayerNormalization(epsilon=1e-12, name="head_norm")(x)
    return keras.Model(inputs, table(x, as_logits=True), name="bert")


def _embedded(
    table: layers.TiedEmbedding, positions: int, length: int | None, packed: bool
) -> tuple[Any, keras.KerasTensor, keras.KerasTensor | None]:
    """Returns the inputs, their vectors [batch, length, width] and the mask of the attention."""
    normal = table.embeddings_initializer.clone()
    # TensorFlow would compute with int32 tokens on the host.
    names = ["token", "segment", "position"] if packed else ["token"]
    inputs = {name: keras.Input((length,), dtype="int64", name=name) for name in names}
    x = table(inputs["token"])
    if not packed:
        return inputs["token"], layers.PositionEmbedding(normal, name="positions")(x), None
    vectors = keras.layers.Embedding(
        positions, table.output_dim, embeddings_initializer=normal, name="positions"
    )
    x = keras.layers.Add(name="placed")([x, vectors(inputs["position"])])
    segment = inputs["segment"]
    return inputs, x, keras.ops.equal(segment[:, :, None], segment[:, None, :])


@dataclasses.dataclass(frozen=True)
class _Block:
    """Attention and a perceptron, each added to its input and normalized first or last."""

    heads: int
    dropout: float
    epsilon: float
    first: keras.initializers.Initializer
    last: keras.initializers.Initializer
    normalizes_first: bool = True
    causal: bool = False
    mask: keras.KerasTensor | None = None

    def add(self, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """Adds the block to x [batch, positions, width]."""
        width = x.shape[-1]
        first, last = self.first.clone(), self.last.clone()
        attention = keras.layers.MultiHeadAttention(
            self.heads,
            width // self.heads,
            dropout=self.dropout,
            kernel_initializer=first,
            name=f"{name}_attention",
        )
        inner = keras.layers.Dense(
            4 * width, "gelu", kernel_initializer=first, name=f"{name}_hidden"
        )
        out = keras.layers.Dense(width, kernel_initializer=last, name=f"{name}_hidden_out")
        masks = {"use_causal_mask": self.causal, "attention_mask": self.mask}
        x = self._add(x, lambda x: attention(x, x, **masks), f"{name}_attention")
        return self._add(x, lambda x: out(inner(x)), f"{name}_hidden")

    def _add(self, x: keras.KerasTensor, branch: Callable[..., Any], name: str) -> Any:
        normalize = keras.layers.LayerNormalization(epsilon=self.epsilon, name=f"{name}_norm")
        change = branch(normalize(x) if self.normalizes_first else x)
        change = keras.layers.Dropout(self.dropout, name=f"{name}_dropout")(change)
        x = keras.layers.Add(name=f"{name}_add")([x, change])
        return x if self.normalizes_first else normalize(x)


def _check(model: str, width: int, **sizes: int) -> None:
    for name, size in {"width": width, **sizes}.items():
        if size < 1:
            raise ConfigError(f"{model}.{name} must be at least 1, got {size}.")
    if width % sizes["heads"]:
        raise ConfigError(
            f"{model}.heads must divide {model}.width, got {sizes['heads']} heads for a width of "
            f"{width}. Change one of them."
        )
