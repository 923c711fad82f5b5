"""Keras's recurrent layers, with dropout that draws by position in the global batch.

Each layer subclasses the Keras layer of the same name and keeps its arguments, variables and
config. Outside a ddl trainer it draws like Keras. In a trainer the masks are bit-identical for any
number of replicas and microbatches. As in Keras, all time steps of an example share a mask (Gal and
Ghahramani 2016, "A Theoretically Grounded Application of Dropout in Recurrent Neural Networks").
"""

import functools
from typing import Any

import keras
import tensorflow as tf

import ddl.random
from ddl import microbatch

register = keras.saving.register_keras_serializable("ddl")


@register
class LSTM(keras.layers.LSTM):
    """Hochreiter and Schmidhuber 1997, "Long Short-Term Memory"."""

    def __init__(self, *args: Any, **arguments: Any):
        """Takes the arguments of Keras's layer."""
        super().__init__(*args, **arguments)
        _draw_by_position(self.cell)


@register
class GRU(keras.layers.GRU):
    """Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder"."""

    def __init__(self, *args: Any, **arguments: Any):
        """Takes the arguments of Keras's layer."""
        super().__init__(*args, **arguments)
        _draw_by_position(self.cell)


@register
class SimpleRNN(keras.layers.SimpleRNN):
    """Elman 1990, "Finding Structure in Time"."""

    def __init__(self, *args: Any, **arguments: Any):
        """Takes the arguments of Keras's layer."""
        super().__init__(*args, **arguments)
        _draw_by_position(self.cell)


def _draw_by_position(cell: keras.layers.Layer) -> None:
    """Replaces the masks of a cell.

    The layer makes them before its loop over the time steps. The hook is private to Keras;
    tests/layers/test_sequence_layers.py guards it.
    """
    cell.draws_by_position = True
    cell._create_dropout_mask = functools.partial(_mask, cell)


def _mask(cell: Any, inputs: tf.Tensor, rate: float) -> Any:
    """Returns a mask of the inputs [batch, units]; a list where Keras has one for each gate."""
    if microbatch.current() is None:
        return type(cell)._create_dropout_mask(cell, inputs, rate)
    count = getattr(cell, "dropout_mask_count", None)
    masks = [_one_mask(cell, inputs, rate) for _ in range(count or 1)]
    return masks if count else masks[0]


def _one_mask(cell: Any, inputs: tf.Tensor, rate: float) -> tf.Tensor:
    share = ddl.random.as_drawn(1 - rate)
    kept = ddl.random.bernoulli(cell, list(keras.ops.shape(inputs)), 1 - rate)
    return tf.cast(kept, inputs.dtype) * tf.constant(1 / share if share else 0.0, inputs.dtype)
