"""Information for a loss about the rows that it computes."""

from typing import NamedTuple

import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError


class CurrentBatch(NamedTuple):
    """The rows of a loss: a part of the global batch, on one replica, in one microbatch.

    Attributes:
      mask: bool [rows], False for padding and for examples whose weight in the data is 0.
      weight: float32 [rows], the weight of each example in the data; 0 for padding. The Trainer
        multiplies by it; a loss must not.
      positions: int64 [rows], the position of each row in the global batch.
      step: int64 [], number of updates made so far, also in an evaluation.
      training: Whether this is a training pass.
    """

    mask: tf.Tensor
    weight: tf.Tensor
    positions: tf.Tensor
    step: tf.Tensor
    training: bool


def current_batch() -> CurrentBatch:
    """Returns the rows of the loss that calls it. Replica context.

        def per_example(self, features, training):
            share = tf.minimum(1.0, tf.cast(ddl.current_batch().step, tf.float32) / 1000)
            …

    Raises:
      ConfigError: Outside of a loss that a Trainer runs.
    """
    current = microbatch.current()
    if current is None or not current.rows:  # a step computes no rows
        raise ConfigError(
            "ddl.current_batch() must be called in a loss that a ddl.Trainer runs, which has a "
            "batch. In a step, use update.step; elsewhere, pass what the function needs."
        )
    weight = tf.ones([current.rows]) if current.weight is None else current.weight
    step = tf.zeros([], tf.int64) if current.step is None else current.step
    return CurrentBatch(
        mask=weight > 0,
        weight=weight,
        positions=tf.cast(current.first_row, tf.int64) + tf.range(current.rows, dtype=tf.int64),
        step=step,
        training=current.training,
    )
