"""The order of the examples: a pure function of (seed, epoch, position), with no state.

Every example comes exactly once an epoch. The order depends on nothing else: not on replicas,
workers, threads or timing. Any batch of the run is computed directly from its number, so going
on from step one million costs what starting from step 0 does.
"""

import os

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.random import PHILOX

# The cipher under RandomIndexShuffle works on blocks of 16 bits or more and tries again until it
# lands below n, which small n pays for with n/65,536 of success a try; sorting random keys is
# cheaper there. The limit must never change: it decides the order for a given n.
SORTED_UP_TO = 4096

# Many batches are ordered at once, so that a batch costs a slice of them: of a small data set an
# epoch, which one sort serves.
_ROWS_AT_ONCE = 8192

# tf.random.experimental.index_shuffle makes 4 rounds of the cipher, which leave structure behind:
# for n = 60,000 the means of batches of 32 vary a quarter as much as those of random batches, for
# n = 65,537 a sixteenth. From 8 rounds on nothing of it can be measured.
_ROUNDS = 8

# Sets this use of the seed apart from others (weights, dropout) that draw from the same seed.
_DOMAIN = int.from_bytes(b"ddlorder", "big")


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Batches in which every example comes once, the last one padded: ceil(n / B).

    Raises:
      DataError: If there are no examples.
      ConfigError: If the batch size is not positive.
    """
    if num_examples < 1:
        raise DataError("the data set is empty: there is nothing to make batches of")
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size is {global_batch_size}; it is 1 or more")
    return -(-num_examples // global_batch_size)


def batch_indices(
    batch: tf.Tensor,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Which examples global batch number `batch` consists of.

    Row i of batch k has position p = (k mod steps per epoch)·B + i in its epoch. It is padding
    where p ≥ n; padding repeats the epoch's first examples, so that its content is as plausible
    as any, and weighs 0.

    Works eagerly, in tf.data and in a tf.function, on the CPU.

    Args:
      batch: int64 [], counted from 0 over the whole run.
      num_examples: n, examples an epoch.
      global_batch_size: B.
      seed: Any integer; its lowest 64 bits count.
      shuffle: Whether each epoch has a random order of its own, or all have the stored order.

    Returns:
      Indices into the data, int64 [B], and weights, float32 [B], 1 or 0.
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    batch = tf.cast(batch, tf.int64)
    first = (batch % steps) * global_batch_size
    position = first + tf.range(global_batch_size, dtype=tf.int64)
    return _indices(position, batch // steps, num_examples, seed, shuffle)


def index_batches(
    first_batch: int,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int,
    shuffle: bool,
    rows: np.ndarray | None = None,
) -> tf.data.Dataset:
    """What `batch_indices` gives for batches first_batch, first_batch + 1, … without end.

    Args:
      first_batch: Counted from 0 over the whole run.
      num_examples: As in `batch_indices`.
      global_batch_size: Likewise.
      seed: Likewise.
      shuffle: Likewise.
      rows: Which rows of each batch to give, and in which order, int [b]; None: all B.

    Returns:
      Dicts of "index", int64 [b], and "weight", float32 [b].
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    at_once = _batches_at_once(num_examples, global_batch_size)
    parts = -(-steps // at_once)

    def part(number: tf.Tensor) -> dict[str, tf.Tensor]:
        return indices_from(
            number // parts * steps + number % parts * at_once,
            num_examples=num_examples,
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            rows=rows,
        )

    epoch, batch = divmod(first_batch, steps)
    made = tf.data.Dataset.counter(epoch * parts + batch // at_once).map(
        part, num_parallel_calls=os.cpu_count() or 1, deterministic=True
    )
    # The threads that make them hand over a part at a time: they are woken once for many batches.
    return made.prefetch(1).unbatch().skip(batch % at_once)


def indices_from(
    batch: tf.Tensor,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int,
    shuffle: bool,
    rows: np.ndarray | None = None,
) -> dict[str, tf.Tensor]:
    """What `batch_indices` gives for a batch and some that follow it in the epoch, in one go.

    Takes what `index_batches` takes, but for the first: batch is int64 [].

    Returns:
      "index", int64 [k, b], and "weight", float32 [k, b].
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    epoch, first = batch // steps, batch % steps
    count = tf.minimum(steps - first, _batches_at_once(num_examples, global_batch_size))
    position = first * global_batch_size + tf.range(count * global_batch_size)
    index, weight = _indices(position, epoch, num_examples, seed, shuffle)
    shape = [-1, global_batch_size]
    made = {"index": tf.reshape(index, shape), "weight": tf.reshape(weight, shape)}
    if rows is None:
        return made
    return {name: tf.gather(each, rows, axis=1) for name, each in made.items()}


def _batches_at_once(num_examples: int, global_batch_size: int) -> int:
    if num_examples <= SORTED_UP_TO:
        return steps_per_epoch(num_examples, global_batch_size)
    return max(1, _ROWS_AT_ONCE // global_batch_size)


def _indices(
    position: tf.Tensor, epoch: tf.Tensor, num_examples: int, seed: int, shuffle: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Indices and weights of the rows at some positions of an epoch, int64 [b] and []."""
    weight = tf.cast(position < num_examples, tf.float32)
    index = position % num_examples
    if shuffle and num_examples > 1:
        index = _permute(index, num_examples, _epoch_key(seed, epoch))
    return index, weight


def _epoch_key(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Three uint32 words that look unrelated from epoch to epoch and seed to seed."""
    # Epochs differ in one bit; the few rounds of the cipher would not spread it, Philox does.
    counter = tf.stack([tf.cast(epoch, tf.uint64), tf.constant(_DOMAIN, tf.uint64)])
    return _random_words(seed % 2**64, counter, 3, tf.uint32)


def _permute(index: tf.Tensor, num_examples: int, key: tf.Tensor) -> tf.Tensor:
    """Where a permutation of 0 … num_examples - 1, chosen by `key`, takes `index`, int64 [b]."""
    if num_examples > SORTED_UP_TO:
        return tf.raw_ops.RandomIndexShuffle(
            index=index,
            seed=key,
            max_index=tf.constant(num_examples - 1, tf.int64),
            rounds=_ROUNDS,
        )
    counter = tf.concat([tf.bitcast(key[:2], tf.uint64)[tf.newaxis], [_DOMAIN]], axis=0)
    sort_keys = _random_words(_DOMAIN, counter, num_examples, tf.int32)
    # top_k breaks ties by position, the same on every machine.
    permutation = tf.math.top_k(sort_keys, k=num_examples).indices
    return tf.cast(tf.gather(permutation, index), tf.int64)


def _random_words(key: int, counter: tf.Tensor, count: int, dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count],
        key=tf.constant([key], tf.uint64),
        counter=counter,
        alg=PHILOX,
        dtype=dtype,
    )
