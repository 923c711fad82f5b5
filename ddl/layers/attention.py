"""Attention whose dropout draws by position in the global batch."""

import keras

from ddl.layers.dropout_and_noise import Dropout

register = keras.saving.register_keras_serializable("ddl")


@register
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """Keras's attention, with the dropout of its weights by `ddl.layers.Dropout`.

    Vaswani et al. 2017, "Attention Is All You Need". Arguments, variables and outputs are those of
    Keras's layer. In a trainer the draws are bit-identical for any number of replicas and
    microbatches; outside of one, the layer draws like Keras.
    """

    def _build_attention(self, rank: int) -> None:
        # Private to Keras; tests/layers/test_sequence_layers.py guards it.
        rate: float = self._dropout  # type: ignore[has-type]
        self._dropout = 0.0  # Keras's own layer then draws nothing
        super()._build_attention(rank)
        self._dropout = rate
        self._dropout_layer = Dropout(self._dropout, dtype=self.dtype_policy, seed=self.seed)
