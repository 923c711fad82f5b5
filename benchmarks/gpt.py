"""A small GPT for benchmarks: decoder blocks with causal attention, normalized first."""

import keras
import tensorflow as tf

import ddl


class CausalAttention(keras.layers.Layer):
    """Attention of each position to itself and to those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.project = keras.layers.Dense(3 * width)
        self.merge = keras.layers.Dense(width)

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Builds the projections."""
        self.project.build(shape)
        self.merge.build(shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps [batch, positions, width] to the same shape."""
        positions, size = inputs.shape[1], self.width // self.heads
        projected = tf.reshape(self.project(inputs), [-1, positions, 3, self.heads, size])
        queries, keys, values = tf.unstack(tf.transpose(projected, [2, 0, 3, 1, 4]))
        scores = tf.matmul(queries, keys, transpose_b=True) * size**-0.5
        before = tf.linalg.band_part(tf.ones([positions, positions], tf.bool), -1, 0)
        scores = tf.where(before, scores, tf.constant(-1e4, scores.dtype))
        weighted = tf.matmul(tf.nn.softmax(scores), values)
        return self.merge(tf.reshape(tf.transpose(weighted, [0, 2, 1, 3]), tf.shape(inputs)))


class Positions(keras.layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Creates the vectors, [positions, width]."""
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Adds the vectors to inputs [batch, positions, width]."""
        return inputs + self.table


def gpt(positions: int, vocabulary: int, *, width: int, heads: int, blocks: int) -> keras.Model:
    """Builds the model, from tokens int64 [batch, positions] to logits [..., vocabulary].

    TensorFlow would compute with int32 tokens on the host.
    """
    layers = keras.layers
    tokens = keras.Input((positions,), dtype="int64", name="image")
    x = Positions()(layers.Embedding(vocabulary, width)(tokens))
    for _ in range(blocks):
        x = x + CausalAttention(width, heads)(layers.LayerNormalization()(x))
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    return keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


class NextToken:
    """The task: the feature "label" holds the token after each of "image"."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def per_example(self, features: dict[str, tf.Tensor], training: bool) -> ddl.PerExample:
        """Returns each sequence's mean loss and accuracy."""
        logits = tf.cast(self.model(features["image"], training=training), tf.float32)
        labels = features["label"]
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        right = tf.equal(tf.argmax(logits, -1, tf.int64), tf.cast(labels, tf.int64))
        accuracy = tf.reduce_mean(tf.cast(right, tf.float32), -1)
        return ddl.PerExample(tf.reduce_mean(loss, -1), {"accuracy": accuracy})
