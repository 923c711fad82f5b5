"""Where an example stands in an epoch of a shuffled data set."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ddl.data.order import SORTED_UP_TO, epoch_key, indices_at, last_index, steps_per_epoch
from ddl.data.seen.cipher import deciphered
from ddl.errors import ConfigError


class Place(NamedTuple):
    """Where a run reads an example.

    Attributes:
      batch: Number of the global batch, counted from 0 over the whole run.
      row: Row in the global batch.
    """

    batch: int
    row: int


def position_of(
    example: int, epoch: int, *, num_examples: int, seed: int, shuffle: bool = True
) -> int:
    """Returns the position at which an epoch reads an example: the inverse of the order.

    Up to `SORTED_UP_TO` examples the epoch is ordered as a whole; above, the time does not depend
    on the number of examples.

    Args:
      example: Index of the example, from 0 to num_examples - 1.
      epoch: Number of the epoch, from 0.
      num_examples: n, examples per epoch.
      seed: Seed of the order.
      shuffle: Whether each epoch has its own random order.

    Raises:
      ConfigError: If there is no such example.
      DataError: If TensorFlow cannot shuffle this number of examples.
    """
    if not 0 <= example < num_examples:
        raise ConfigError(
            f"The example must be from 0 to {num_examples - 1:,}, since the data have "
            f"{num_examples:,} examples, got {example:,}. Correct --example."
        )
    if not shuffle or num_examples == 1:
        return example
    number = tf.constant(epoch, tf.int64)
    if num_examples <= SORTED_UP_TO:
        every = tf.range(num_examples, dtype=tf.int64)
        order = indices_at(every, number, num_examples=num_examples, seed=seed).numpy()
        return int(np.argmax(order == example))
    key = [int(word) for word in epoch_key(seed, number).numpy()]
    last = last_index(num_examples)
    position = deciphered(example, key, last)
    # The permutation may have one index too many, whose example then takes the place of that index
    # (`ddl.data.order`).
    return deciphered(last, key, last) if position == num_examples else position


def place_of(
    example: int,
    epoch: int,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int,
    shuffle: bool = True,
) -> Place:
    """Returns batch and row in which an epoch reads an example.

    Args:
      example: As in `position_of`, like the other arguments.
      epoch: See `position_of`.
      num_examples: See `position_of`.
      global_batch_size: B.
      seed: See `position_of`.
      shuffle: See `position_of`.
    """
    position = position_of(example, epoch, num_examples=num_examples, seed=seed, shuffle=shuffle)
    batch, row = divmod(position, global_batch_size)
    return Place(epoch * steps_per_epoch(num_examples, global_batch_size) + batch, row)
