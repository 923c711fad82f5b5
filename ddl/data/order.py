"""Order of the examples: a stateless, pure function of (seed, epoch, position).

Every example occurs exactly once per epoch. The order does not depend on replicas, workers, threads
or timing. Any batch of the run is computed directly from its number: to resume at step one million
costs the same as to start at step 0.
"""

import functools
import math
import os

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError, DataError
from ddl.seeds import PHILOX

# RandomIndexShuffle's cipher works on blocks of at least 16 bits and repeats until the result is
# below n. For small n a try succeeds with probability n/65,536 only, and sorting random keys is
# cheaper. The limit must never change: it determines the order for a given n.
SORTED_UP_TO = 4096

# Many batches are ordered at once, so that one batch costs only a slice. For a small data set this
# is a whole epoch, which needs one sort.
_ROWS_AT_ONCE = 8192

# tf.random.experimental.index_shuffle runs 4 rounds of the cipher, which leave structure: for
# n = 60,000 the means of batches of 32 vary a quarter as much as those of random batches, for
# n = 65,537 a sixteenth. From 8 rounds on no structure is measurable.
_ROUNDS = 8

# Bits of the cipher's smallest block.
_SMALLEST_BLOCK = 16

_LARGEST_BATCH = 2**31 - 1

# Separate these uses of the run's seed from others (weights, dropout).
_DOMAIN = int.from_bytes(b"ddlorder", "big")
_STREAM_DOMAIN = int.from_bytes(b"ddlstrea", "big")


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Returns the batches per epoch, ceil(n / B); the last one is padded.

    Args:
      num_examples: n, examples per epoch.
      global_batch_size: B.

    Raises:
      DataError: If there are no examples.
      ConfigError: If the batch size is not from 1 to 2^31 - 1.
    """
    if num_examples < 1:
        raise DataError(
            f"A data set must have at least one example, got {num_examples}. Pass data with "
            "examples, or correct the files or the split that the source reads."
        )
    if global_batch_size < 1:
        raise ConfigError(
            f"The global batch size must be at least 1, got {global_batch_size}. Correct "
            "GLOBAL_BATCH_SIZE in the config, or Trainer.global_batch_size."
        )
    if global_batch_size > _LARGEST_BATCH:
        raise ConfigError(
            f"The global batch size must be at most {_LARGEST_BATCH:,}, since TensorFlow counts "
            f"rows in 32 bits, got {global_batch_size:,}. Set a smaller GLOBAL_BATCH_SIZE."
        )
    return -(-num_examples // global_batch_size)


def batch_indices(
    batch: tf.Tensor,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes which examples form global batch number `batch`.

    Row i of batch k has position p = (k mod steps per epoch)·B + i in its epoch. Rows with p ≥ n
    are padding: they repeat the epoch's first examples, which are valid inputs, at weight 0.

    Runs eagerly, in tf.data and in a tf.function, on the CPU.

    Args:
      batch: Batch number, int64 [], counted from 0 over the whole run.
      num_examples: n, examples per epoch.
      global_batch_size: B.
      seed: Any integer, of which the lowest 64 bits are used.
      shuffle: Whether each epoch has its own random order; otherwise all have the stored order.

    Returns:
      Indices into the data, int64 [B], and weights, float32 [B], each 1 or 0.

    Raises:
      DataError: If there are no examples, or TensorFlow cannot shuffle this number of them.
      ConfigError: If the batch size is not positive.
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
    """Builds an endless data set of `batch_indices` for first_batch, first_batch + 1, ….

    Args:
      first_batch: Batch number, counted from 0 over the whole run.
      num_examples: As in `batch_indices`.
      global_batch_size: As in `batch_indices`.
      seed: As in `batch_indices`.
      shuffle: As in `batch_indices`.
      rows: Rows of each batch to return, in this order, int [b]; None returns all B.

    Returns:
      Dicts of "index", int64 [b], and "weight", float32 [b].

    Raises:
      DataError: As in `batch_indices`.
      ConfigError: As in `batch_indices`.
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    at_once = batches_at_once(num_examples, global_batch_size)
    parts = -(-steps // at_once)

    @tf.autograph.experimental.do_not_convert  # converting takes longer than tracing
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
    # The map threads pass on one part at a time, and so are woken once for many batches.
    return made.prefetch(1).unbatch().skip(batch % at_once)


def indices_from(
    batch: tf.Tensor,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int,
    shuffle: bool,
    rows: np.ndarray | None = None,
    at_least: int = 1,
) -> dict[str, tf.Tensor]:
    """Computes `batch_indices` for a batch and several that follow it in the epoch, at once.

    Takes the arguments of `index_batches`, except that the first is a batch number, int64 [].
    `at_least` is that of `batches_at_once`.

    Returns:
      "index", int64 [k, b], and "weight", float32 [k, b].
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    epoch, first = batch // steps, batch % steps
    count = tf.minimum(steps - first, batches_at_once(num_examples, global_batch_size, at_least))
    position = first * global_batch_size + tf.range(count * global_batch_size)
    index, weight = _indices(position, epoch, num_examples, seed, shuffle)
    shape = [-1, global_batch_size]
    made = {"index": tf.reshape(index, shape), "weight": tf.reshape(weight, shape)}
    if rows is None:
        return made
    return {name: tf.gather(each, rows, axis=1) for name, each in made.items()}


def indices_at(position: tf.Tensor, epoch: tf.Tensor, *, num_examples: int, seed: int) -> tf.Tensor:
    """Returns which examples stand at these positions of a shuffled epoch, int64 [k].

    Args:
      position: int64 [k], each from 0 to num_examples - 1.
      epoch: Number of the epoch, int64 [], counted from 0.
      num_examples: n, examples per epoch.
      seed: As in `batch_indices`.
    """
    return _indices(position, epoch, num_examples, seed, True)[0]


def stream_seeds(seed: int, epoch: tf.Tensor, shard: int) -> tf.Tensor:
    """Returns two seeds, int64 [2], that shuffle a shard of a stream in an epoch, int64 []."""
    counter = tf.stack([tf.cast(epoch, tf.uint64), tf.constant(_STREAM_DOMAIN + shard, tf.uint64)])
    return _random_words(seed % 2**64, counter, 2, tf.int64)


def batches_at_once(num_examples: int, global_batch_size: int, at_least: int = 1) -> int:
    """Returns the largest number of batches that `indices_from` orders at once.

    Args:
      num_examples: n, examples per epoch.
      global_batch_size: B.
      at_least: Number of batches to order, however many rows they have.
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    if num_examples <= SORTED_UP_TO:
        return steps
    return min(steps, max(at_least, _ROWS_AT_ONCE // global_batch_size))


def _indices(
    position: tf.Tensor, epoch: tf.Tensor, num_examples: int, seed: int, shuffle: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns indices, int64 [b], and weights, float32 [b], of positions [b] of an epoch []."""
    weight = tf.cast(position < num_examples, tf.float32)
    index = position % num_examples
    if shuffle and num_examples > 1:
        index = _permute(index, num_examples, _epoch_key(seed, epoch))
    return index, weight


def _epoch_key(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Returns three uint32 words that look unrelated from epoch to epoch and seed to seed."""
    # Consecutive epochs may differ in one bit. The cipher's few rounds would not spread that bit;
    # Philox does.
    counter = tf.stack([tf.cast(epoch, tf.uint64), tf.constant(_DOMAIN, tf.uint64)])
    return _random_words(seed % 2**64, counter, 3, tf.uint32)


def _permute(index: tf.Tensor, num_examples: int, key: tf.Tensor) -> tf.Tensor:
    """Applies the permutation of 0 … num_examples - 1 that `key` selects to `index`, int64 [b]."""
    if num_examples > SORTED_UP_TO:
        return _enciphered(index, num_examples, key)
    counter = tf.concat([tf.bitcast(key[:2], tf.uint64)[tf.newaxis], [_DOMAIN]], axis=0)
    sort_keys = _random_words(_DOMAIN, counter, num_examples, tf.int32)
    # top_k breaks ties by position, and so gives the same result on every machine.
    permutation = tf.math.top_k(sort_keys, k=num_examples).indices
    return tf.cast(tf.gather(permutation, index), tf.int64)


def _enciphered(index: tf.Tensor, num_examples: int, key: tf.Tensor) -> tf.Tensor:
    """Does the work of `_permute` for data sets that are too large to sort."""
    last = _last_index(num_examples)
    # Every call with this key applies the same permutation of 0 … last.
    permute = functools.partial(
        tf.raw_ops.RandomIndexShuffle,
        seed=key,
        max_index=tf.constant(last, tf.int64),
        rounds=_ROUNDS,
    )
    if last < num_examples:
        return permute(index=index)
    # The permutation has one index too many, num_examples. The example mapped to it takes the
    # place to which the extra index is mapped, so 0 … num_examples - 1 map onto themselves.
    extra = tf.constant([num_examples], tf.int64)
    places = permute(index=tf.concat([index, extra], axis=0))
    return tf.where(places[:-1] == extra, places[-1], places[:-1])


def _last_index(num_examples: int) -> int:
    """Returns `max_index` for RandomIndexShuffle: num_examples - 1, or num_examples if that fails.

    RandomIndexShuffle permutes 0 … max_index if and only if its cipher's block can hold max_index.
    A Feistel cipher permutes all values of a block, and walking along its cycles until a value is
    in range permutes the values in range. The block has ⌈log2(max_index)⌉ bits, rounded up to an
    even number, at least 16. This is one bit too few for powers of 4 from 4⁸ on, and for numbers
    slightly above 4ᵏ, k ≥ 25, whose logarithm rounds to 2k as a double.

    Raises:
      DataError: If both values fail; the smallest such num_examples is 2⁵⁰ + 1.
    """
    for last in (num_examples - 1, num_examples):
        bits = math.ceil(math.log2(last))
        if max(bits + bits % 2, _SMALLEST_BLOCK) >= last.bit_length():
            return last
    raise DataError(
        f"A data set of {num_examples:,} examples cannot be shuffled: TensorFlow's "
        "RandomIndexShuffle is not a permutation for this size. Use another length, such as a "
        "power of two, or set shuffle=False."
    )


def _random_words(key: int, counter: tf.Tensor, count: int, dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count],
        key=tf.constant([key], tf.uint64),
        counter=counter,
        alg=PHILOX,
        dtype=dtype,
    )
