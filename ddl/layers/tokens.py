"""Layers that turn tokens and patches into vectors, and back."""

from typing import Any

import keras
import tensorflow as tf

from ddl.layers.lookups import as_ids

register = keras.saving.register_keras_serializable("ddl")


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


@register
class ClassToken(keras.layers.Layer):
    """Puts a learned vector ahead of each sequence."""

    def build(self, input_shape: Any) -> None:
        """Creates the vector, [1, 1, width]."""
        self.token = self.add_weight(
            shape=(1, 1, input_shape[-1]), initializer="zeros", name="token"
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps float [batch, positions, width] to [batch, 1 + positions, width]."""
        batch = tf.shape(inputs)[0]
        token = tf.tile(tf.cast(self.token, inputs.dtype), [batch, 1, 1])
        return tf.concat([token, inputs], axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        batch, positions, width = input_shape
        return batch, None if positions is None else positions + 1, width
