"""What the layers that draw by position share."""

import keras
import tensorflow as tf

from ddl import microbatch


class ByPosition(keras.layers.Layer):
    """Stands before a layer of Keras: in training within a trainer, `drawn` replaces its call."""

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From float [batch, …] to the same."""
        if not training or microbatch.current() is None:
            return super().call(inputs, training=training)
        return self.drawn(inputs)

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """The call in training, drawing from `ddl.random`."""
        raise NotImplementedError
