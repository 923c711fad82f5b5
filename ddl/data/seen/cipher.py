"""The inverse of TensorFlow's `RandomIndexShuffle`, which has none of its own.

The operation enciphers an index with the block cipher Simon (Beaulieu et al. 2013, "The Simon and
Speck families of lightweight block ciphers"), in blocks just large enough for the largest index,
and enciphers the result again until it is in range. Backwards, the rounds are undone from the last
to the first, again until the result is in range. tests/data/seen/test_positions.py compares both
directions with TensorFlow.
"""

import math
from collections.abc import Sequence

from ddl.data.order import ROUNDS, SMALLEST_BLOCK

_CONSTANT = 0xFFFFFFFC  # of the key schedule
_SEQUENCE = 0x7369F885192C0EF5


def deciphered(value: int, key: Sequence[int], max_index: int) -> int:
    """Returns the index that `RandomIndexShuffle` maps to a value.

    Args:
      value: From 0 to `max_index`.
      key: The three 32-bit words of the seed.
      max_index: The largest index.
    """
    bits = math.ceil(math.log2(max_index))
    half = max(bits + bits % 2, SMALLEST_BLOCK) // 2
    keys = _round_keys(key, half)
    while True:
        value = _decrypted(value, keys, half)
        if value <= max_index:
            return value


def _round_keys(key: Sequence[int], bits: int) -> list[int]:
    mask = (1 << bits) - 1
    keys = [word & mask for word in key]
    constant, sequence = _CONSTANT & mask, _SEQUENCE & mask
    for _ in range(len(keys), ROUNDS):
        keys.append(
            constant
            ^ (sequence & 1)
            ^ keys[-3]
            ^ _rotated(keys[-1], -3, bits)
            ^ _rotated(keys[-1], -4, bits)
        )
        sequence >>= 1
    return keys


def _decrypted(value: int, keys: Sequence[int], bits: int) -> int:
    left, right = value >> bits, value & ((1 << bits) - 1)
    for first, second in zip(keys[-2::-2], keys[::-2], strict=True):
        right ^= second ^ _mixed(left, bits)
        left ^= first ^ _mixed(right, bits)
    return left << bits | right


def _mixed(word: int, bits: int) -> int:
    return (_rotated(word, 1, bits) & _rotated(word, 8, bits)) ^ _rotated(word, 2, bits)


def _rotated(word: int, count: int, bits: int) -> int:
    """Rotates a word to the left; to the right if the count is negative."""
    count %= bits
    return ((word << count) | (word >> (bits - count))) & ((1 << bits) - 1)
