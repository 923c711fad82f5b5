"""Attention whose dropout draws by position in the global batch.

Keras's layer multiplies each example by a kernel on its own, so that the gradient of the kernel
holds a kernel for each example. This layer computes one product for all rows of the batch.
"""

import functools
import math
from typing import Any

import keras
import tensorflow as tf

from ddl.layers.dropout_and_noise import Dropout

register = keras.saving.register_keras_serializable("ddl")


@register
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """Keras's attention, with the dropout of its weights by `ddl.layers.Dropout`.

    Vaswani et al. 2017, "Attention Is All You Need". Arguments, variables and outputs are those of
    Keras's layer. In a trainer the draws are bit-identical for any number of replicas and
    microbatches; outside of one, the layer draws like Keras.
    """

    # The names with an underscore are private to Keras; tests/layers/test_sequence_layers.py guards
    # them.

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        """Creates the kernels; see `keras.layers.MultiHeadAttention`."""
        super().build(query_shape, value_shape, key_shape)
        for dense in (self._query_dense, self._key_dense, self._value_dense, self._output_dense):
            # Another class would keep Keras from quantizing the layer.
            dense.call = functools.partial(_project, dense)

    def _build_attention(self, rank: int) -> None:
        rate: float = self._dropout  # type: ignore[has-type]
        self._dropout = 0.0  # Keras's own layer then draws nothing
        super()._build_attention(rank)
        self._dropout = rate
        self._dropout_layer = Dropout(self._dropout, dtype=self.dtype_policy, seed=self.seed)


def _project(dense: Any, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
    """Computes an EinsumDense that contracts the last dimensions of its inputs as one product."""
    operands, outputs = dense.equation.split("->")
    of_inputs, of_kernel = operands.split(",")
    contracted = "".join(letter for letter in of_inputs if letter not in outputs)
    batch = of_inputs.removesuffix(contracted)
    is_matrix = outputs == batch + of_kernel.removeprefix(contracted)
    kernel, bias = dense.kernel, dense.bias
    sizes = kernel.shape[len(contracted) :]
    if not is_matrix or (bias is not None and tuple(bias.shape) != tuple(sizes)):
        return type(dense).call(dense, inputs, training=training)
    table = tf.reshape(kernel, [-1, math.prod(sizes)])
    rows = tf.reshape(tf.cast(inputs, table.dtype), [-1, table.shape[0]])
    found = tf.matmul(rows, table)
    if bias is not None:
        found = tf.nn.bias_add(found, tf.reshape(bias, [-1]))
    found = tf.reshape(found, [*keras.ops.shape(inputs)[: len(batch)], *sizes])
    return found if dense.activation is None else dense.activation(found)
