"""Base class of the layers that draw by position in the global batch."""

import keras
import tensorflow as tf

from ddl import microbatch


class ByPosition(keras.layers.Layer):
    """Mixin ahead of a Keras layer: in a trainer, `drawn` replaces its `call` in training."""

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Maps float [batch, …] to the same shape and dtype."""
        if not training or microbatch.current() is None:
            return super().call(inputs, training=training)
        return self.drawn(inputs)

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """Computes the training output with draws from `ddl.random`. Replica context."""
        raise NotImplementedError
