"""Checksums of the values that a callback may change."""

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.optimizers.groups import by_name
from ddl.tasks.parts import copies_of, layers_of, own_variables_of, variables_of
from ddl.training.trainer import Trainer

_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}
"""Integers by their number of bytes; a GPU keeps these wider than one byte."""


class Fingerprint:
    """Checksums of what a callback may change in a trainer. Eager, on one worker only.

    Those of the weights, of the optimizers' slots and of averages are computed on the device, which
    reads each once. A checksum differs wherever an entry does, up to chance; a change back is none.
    """

    def __init__(self, trainer: Trainer):
        """Keeps the trainer; traces nothing before the first call."""
        self._trainer = trainer
        self._traced: Any = None

    def __call__(self, holder: object) -> list[float]:
        """Returns the checksums, of each variable, and the learning rates.

        Args:
          holder: The object of the callback, whose variables count too; None for none.
        """
        trainer = self._trainer
        # Not traced by a call: TensorFlow warns of frequent traces.
        self._traced = self._traced or self._of_weights.get_concrete_function()
        own = own_variables_of(trainer.task, layers_of(trainer.task)) + variables_of([holder])
        return [
            *map(int, self._traced().numpy()),
            *trainer.learning_rates.values(),
            *(zlib.crc32(_bytes_of(_first_copy(variable))) for variable in own),
        ]

    @tf.function(autograph=False)
    def _of_weights(self) -> tf.Tensor:
        """Returns the checksum of each variable of layers, optimizers and averages: int64 [n]."""
        trainer = self._trainer
        holders = [*layers_of(trainer.task), *by_name(trainer.optimizer).values()]
        variables = [variable.value for holder in holders for variable in holder.variables]
        if trainer.averages is not None:
            variables += trainer.averages.variables
        shares = [] if trainer.sharding is None else trainer.sharding.slots.values()
        in_shares = {id(share.variable.value) for share in shares}
        unique = {id(v): v for v in variables if v.dtype != tf.string}
        copies = [
            copy
            for v in unique.values()
            for copy in (copies_of(v) if id(v) in in_shares else [_first_copy(v)])
        ]
        return tf.stack([tf.zeros([], tf.int64), *map(_checksum, copies)])


def _first_copy(variable: tf.Variable) -> tf.Variable:
    return copies_of(variable)[0]


def _bytes_of(variable: tf.Variable) -> bytes:
    values = variable.numpy()
    # An array of texts holds their addresses; a single text is no array.
    return (
        repr(np.asarray(values).tolist()).encode()
        if variable.dtype == tf.string
        else values.tobytes()
    )


def _checksum(variable: tf.Variable) -> tf.Tensor:
    """Returns an int64 [] that depends on the bits and the place of each entry."""
    values = tf.reshape(variable.read_value(), [-1])
    if values.dtype.is_complex:
        values = tf.concat([tf.math.real(values), tf.math.imag(values)], axis=0)
    if values.dtype == tf.bool:
        bits = tf.cast(values, tf.int64)
    else:
        bits = tf.cast(tf.bitcast(values, _BITS[values.dtype.size]), tf.int64)
    places = tf.range(tf.size(bits, tf.int64), dtype=tf.int64)
    # Odd factors, modulo 2^64: a change of one entry always changes the sum.
    return tf.reduce_sum(bits * (2 * _mixed(places) + 1))


def _mixed(places: tf.Tensor) -> tf.Tensor:
    """Returns a factor for each place, as by the golden ratio (Knuth, vol. 3, section 6.4)."""
    product = places * np.int64(-7046029254386353131)
    return tf.bitwise.bitwise_xor(product, tf.bitwise.right_shift(product, np.int64(29)))
