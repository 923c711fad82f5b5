"""Order of the examples: a pure function of (seed, epoch, position).

Every example occurs exactly once per epoch. The order does not depend on replicas, workers, threads
or timing. Any batch of a run is computed from its number alone: to resume at step one million costs
the same as to start at step 0.

The permutation of more than 1,024 examples is a Feistel network whose rounds are keyed by Philox
(Luby and Rackoff 1988, "How to construct pseudorandom permutations"; Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). It permutes 4^k numbers, and walks along its cycles until a
number below n comes (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Fewer
examples are sorted by random keys: blocks of a few bits would not reach all permutations.
"""

import functools

import numpy as np

from ddl.errors import ConfigError, DataError

_ROUNDS = 6
_SORTED_UP_TO = 1024
_LARGEST = 2**40
_LARGEST_BATCH = 2**31 - 1
_DOMAIN = int.from_bytes(b"ddlorder", "big")  # apart from other uses of the run's seed
_MULTIPLIERS = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))  # odd: each is a bijection mod 2^32


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Returns the batches per epoch, ceil(n / B); the last one is padded.

    Args:
      num_examples: n, examples per epoch.
      global_batch_size: B.

    Raises:
      DataError: If there are no examples, or more than 2^40.
      ConfigError: If the batch size is not from 1 to 2^31 - 1.
    """
    if not 1 <= num_examples <= _LARGEST:
        raise DataError(f"A data set must have 1 to {_LARGEST:,} examples, got {num_examples:,}.")
    if not 1 <= global_batch_size <= _LARGEST_BATCH:
        raise ConfigError(
            f"GLOBAL_BATCH_SIZE must be from 1 to {_LARGEST_BATCH:,}, got {global_batch_size:,}."
        )
    return -(-num_examples // global_batch_size)


def batch_indices(
    first_batch: int,
    count: int,
    *,
    num_examples: int,
    global_batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes which examples form `count` global batches from number `first_batch` on.

    Row i of batch k has position p = (k mod steps per epoch)·B + i in its epoch. Rows with p ≥ n
    are padding: they repeat the epoch's first examples, which are valid inputs, at weight 0.

    Args:
      first_batch: Batch number, counted from 0 over the whole run.
      count: Number of batches.
      num_examples: n, examples per epoch.
      global_batch_size: B.
      seed: Any integer, of which the lowest 64 bits are used.
      shuffle: Whether each epoch has its own random order; otherwise all have the stored order.

    Returns:
      Indices into the data, int64 [count, B], and weights, float32 [count, B], each 1 or 0.

    Raises:
      DataError: As `steps_per_epoch`.
      ConfigError: As `steps_per_epoch`.
    """
    steps = steps_per_epoch(num_examples, global_batch_size)
    batch = np.arange(first_batch, first_batch + count, dtype=np.int64)
    epoch, of_epoch = np.divmod(batch, steps)
    position = of_epoch[:, np.newaxis] * global_batch_size + np.arange(global_batch_size)
    weight = (position < num_examples).astype(np.float32)
    index = position % num_examples
    if shuffle:
        for number in np.unique(epoch):
            rows = epoch == number
            index[rows] = example_at(index[rows], int(number), num_examples=num_examples, seed=seed)
    return index, weight


def example_at(position: np.ndarray, epoch: int, *, num_examples: int, seed: int) -> np.ndarray:
    """Returns which examples stand at positions of a shuffled epoch.

    Args:
      position: int64 [...], each from 0 to n - 1.
      epoch: Number of the epoch, counted from 0.
      num_examples: n, from 1 to 2^40.
      seed: As in `batch_indices`.

    Returns:
      Indices, int64 [...]: a bijection of 0 … n - 1.
    """
    if num_examples <= _SORTED_UP_TO:
        return _sorted(num_examples, epoch, seed)[position]
    return _walked(position, num_examples, _round_keys(seed, epoch))


@functools.lru_cache(maxsize=8)
def _sorted(num_examples: int, epoch: int, seed: int) -> np.ndarray:
    return np.argsort(random_words(seed, epoch, num_examples), kind="stable")


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    words = random_words(seed, epoch, _ROUNDS)
    return np.stack([words & 0xFFFFFFFF, words >> 32], axis=1).astype(np.uint32)


def random_words(seed: int, epoch: int, count: int, domain: int = _DOMAIN) -> np.ndarray:
    """Returns uint64 [count] that look unrelated for other seeds, epochs and domains.

    NumPy promises them in each version, unlike a generator's numbers.
    """
    key, counter = (np.array(x, np.uint64) for x in ([int(seed) % 2**64, domain], [0, epoch, 0, 0]))
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def _walked(values: np.ndarray, num_examples: int, keys: np.ndarray) -> np.ndarray:
    """Enciphers numbers below n until each is below n again."""
    half = max(1, (int(num_examples - 1).bit_length() + 1) // 2)  # bits of half a block
    flat = _enciphered(np.ravel(values), half, keys)
    (outside,) = np.nonzero(flat >= num_examples)
    while outside.size:
        moved = _enciphered(flat[outside], half, keys)
        flat[outside] = moved
        outside = outside[moved >= num_examples]
    return flat.reshape(np.shape(values))


def _enciphered(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Permutes the numbers of 2 · half bits, half at most 20; reversed keys give the inverse."""
    left = (values >> half).astype(np.uint32)
    right = values.astype(np.uint32) & np.uint32(2**half - 1)
    for key in keys:
        left, right = right, left ^ _mixed(right, key, half)
    return (right.astype(np.int64) << half) | left  # halves change places, so that it is its mirror


def _mixed(half_block: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """Returns the round function: `half` bits that depend on all bits of a half block and a key."""
    mixed = (half_block ^ key[0]) * _MULTIPLIERS[0]
    mixed ^= mixed >> np.uint32(15)
    mixed += key[1]
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> np.uint32(13)
    mixed *= _MULTIPLIERS[0]
    return mixed >> np.uint32(32 - half)


def in_parts(index: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of the part in which each index lies, and its index in that part.

    Args:
      index: int64 [...], over all parts, one after the other.
      ends: Length of each part and those before it, int64 [parts].
    """
    number = np.searchsorted(ends, index, side="right")
    return number, index - np.append(0, ends)[number]
