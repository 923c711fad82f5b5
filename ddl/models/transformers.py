"""Transformers for language and for images."""

from collections.abc import Callable, Sequence

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
    _check_sizes("gpt", vocabulary=vocabulary, positions=positions, blocks=blocks)
    _check_heads("gpt", width, heads)

    # A new one for each layer: an initializer of Keras gives the same numbers at each call.
    def normal() -> keras.initializers.Initializer:
        return keras.initializers.RandomNormal(stddev=0.02)

    def last() -> keras.initializers.Initializer:
        return keras.initializers.RandomNormal(stddev=0.02 / (2 * blocks) ** 0.5)

    # TensorFlow would compute with int32 tokens on the host.
    tokens = keras.Input((positions,), dtype="int64", name="token")
    table = layers.TiedEmbedding(
        vocabulary, width, embeddings_initializer=normal(), name="token_vectors"
    )
    inputs, mask = tokens, None
    if packed:
        segment, position = (
            keras.Input((positions,), dtype="int64", name=name) for name in ("segment", "position")
        )
        inputs = {"token": tokens, "segment": segment, "position": position}
        mask = keras.ops.equal(segment[:, :, None], segment[:, None, :])
        vectors = keras.layers.Embedding(
            positions, width, embeddings_initializer=normal(), name="positions"
        )
        x = keras.layers.Add(name="placed")([table(tokens), vectors(position)])
    else:
        x = layers.PositionEmbedding(normal(), name="positions")(table(tokens))
    x = keras.layers.Dropout(dropout, name="dropout")(x)
    for number in range(1, blocks + 1):
        name = f"block_{number}"
        x = _block(
            *(x, heads, 4 * width, dropout, name, normal, last),
            epsilon=1e-5,
            causal=True,
            mask=mask,
        )
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(inputs, table(x, as_logits=True), name="gpt")


def vit(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    patch: int = 16,
    width: int = 384,
    heads: int = 6,
    blocks: int = 12,
    hidden_units: int | None = None,
    dropout: float = 0.0,
    input_mean: float = 127.5,
    input_deviation: float = 127.5,
) -> keras.Model:
    """Builds a vision transformer: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words".

    The defaults are ViT-S/16 (Touvron et al. 2021, "Training data-efficient image transformers").

    Args:
      input_shape: Shape of one image: height, width, channels.
      num_classes: Number of logits.
      patch: Side of a square patch; it divides height and width.
      width: Width of the vectors.
      heads: Attention heads, a divisor of `width`.
      blocks: Number of blocks.
      hidden_units: Width of the hidden layer of a block; None is 4 · `width`.
      dropout: Dropout rate of the vectors, of the attention and of each branch.
      input_mean: Subtracted from raw inputs.
      input_deviation: Divisor of the centred inputs.

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].

    Raises:
      ConfigError: If `patch` does not divide height and width, `heads` does not divide `width`, or
        a size is below 1.
    """
    _check_sizes("vit", patch=patch, num_classes=num_classes, blocks=blocks)
    _check_heads("vit", width, heads)
    height, breadth = input_shape[:2]
    if height % patch or breadth % patch:
        raise ConfigError(
            f"vit.patch must divide height and width of the images, got {patch} for "
            f"{height} × {breadth}. Set patch to a common divisor."
        )

    def normal() -> keras.initializers.Initializer:  # see gpt
        return keras.initializers.TruncatedNormal(stddev=0.02)

    inputs = keras.Input(tuple(input_shape), name="image")
    x = keras.layers.Rescaling(1 / input_deviation, -input_mean / input_deviation, name="scale")(
        inputs
    )
    x = keras.layers.Conv2D(width, patch, patch, kernel_initializer=normal(), name="patches")(x)
    x = keras.layers.Reshape((-1, width), name="sequence")(x)
    x = layers.ClassToken(name="class_token")(x)
    x = layers.PositionEmbedding(normal(), name="positions")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout")(x)
    for number in range(1, blocks + 1):
        hidden = hidden_units or 4 * width
        x = _block(x, heads, hidden, dropout, f"block_{number}", normal, normal, epsilon=1e-6)
    x = keras.layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    logits = keras.layers.Dense(num_classes, kernel_initializer="zeros", name="logits")(x[:, 0])
    return keras.Model(inputs, logits, name="vit")


def _block(
    x: keras.KerasTensor,
    heads: int,
    hidden_units: int,
    dropout: float,
    name: str,
    initializer: Callable[[], keras.initializers.Initializer],
    last_initializer: Callable[[], keras.initializers.Initializer],
    *,
    epsilon: float,
    causal: bool = False,
    mask: keras.KerasTensor | None = None,
) -> keras.KerasTensor:
    """Adds attention and a perceptron, each normalized first, to x [batch, positions, width]."""
    width = x.shape[-1]

    def added(x: keras.KerasTensor, branch: keras.KerasTensor, part: str) -> keras.KerasTensor:
        if dropout:
            branch = keras.layers.Dropout(dropout, name=f"{name}_{part}_dropout")(branch)
        return keras.layers.Add(name=f"{name}_{part}_add")([x, branch])

    branch = keras.layers.LayerNormalization(epsilon=epsilon, name=f"{name}_attention_norm")(x)
    attention = keras.layers.MultiHeadAttention(
        heads,
        width // heads,
        dropout=dropout,
        kernel_initializer=initializer(),
        name=f"{name}_attention",
    )
    x = added(
        x, attention(branch, branch, use_causal_mask=causal, attention_mask=mask), "attention"
    )
    branch = keras.layers.LayerNormalization(epsilon=epsilon, name=f"{name}_hidden_norm")(x)
    branch = keras.layers.Dense(
        hidden_units, "gelu", kernel_initializer=initializer(), name=f"{name}_hidden"
    )(branch)
    branch = keras.layers.Dense(
        width, kernel_initializer=last_initializer(), name=f"{name}_hidden_out"
    )(branch)
    return added(x, branch, "hidden")


def _check_heads(model: str, width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise ConfigError(
            f"{model}.heads must divide {model}.width, got {heads} heads for a width of {width}. "
            "Change one of them."
        )


def _check_sizes(model: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{model}.{name} must be at least 1, got {size}.")
