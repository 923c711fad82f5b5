"""Checksums of TFRecord files: CRC-32C of many byte strings at a time, in numpy.

A CRC is linear: that of a byte string is the exclusive or of the CRCs of its bytes, each followed
by zeros. A table holds the CRC of each byte value followed by 0, 1, 2, … zeros.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_MASK_ADDED = 0xA282EAD8


def masked_crc32c(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the checksums of byte strings as TFRecord files hold them, uint32 [n].

    Args:
      rows: uint8 [n, longest]; each string stands at the end of its row, after zeros.
      lengths: Length of each string, int [n].
    """
    longest = rows.shape[1]
    table = _table(longest)
    # Zeros ahead change nothing, but a CRC begins with 32 ones, which meet the first four bytes.
    # Those that a shorter string does not meet stay, moved by its bytes.
    shorter = np.minimum(lengths, 4).astype(np.uint64)
    found = (np.uint64(_ONES) >> (8 * shorter)).astype(np.uint32)
    flipped = rows.copy()
    for place in range(4):
        column = longest - lengths + place
        inside = np.flatnonzero(place < lengths)
        flipped[inside, column[inside]] ^= 0xFF
    places = np.arange(longest - 1, -1, -1, dtype=np.int32) * 256
    found ^= np.bitwise_xor.reduce(np.take(table, places + flipped), axis=1)
    crc = found ^ np.uint32(_ONES)
    return ((crc >> 15) | (crc << 17)) + np.uint32(_MASK_ADDED)


@functools.lru_cache(maxsize=2)
def _tables(size: int) -> np.ndarray:
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(_POLYNOMIAL), byte >> 1)
    table = np.zeros([size, 256], np.uint32)
    table[0] = byte
    for zeros in range(1, size):
        table[zeros] = (table[zeros - 1] >> 8) ^ byte[table[zeros - 1] & 0xFF]
    return table.ravel()


def _table(longest: int) -> np.ndarray:
    """Returns the CRC of each byte value followed by zeros, uint32 [size · 256], size ≥ longest."""
    return _tables(1 << max(longest - 1, 1).bit_length())
