"""Many small records of TFRecord files, read in one call.

TensorFlow's reader opens a file for each record, which takes longer than reading a few kilobytes.
"""

import os
from collections.abc import Sequence

import numpy as np

from ddl.data.storage.checksums import masked_crc32c
from ddl.data.storage.record_places import RecordPlaces

_MOST_MEAN = 4096
"""Mean size of the records up to which blocks take less processor time, in bytes."""

_MOST = 16384
"""Size of the largest record, which the table of the checksums grows with, in bytes."""

_CHECKED_AT_ONCE = 1 << 18
"""Bytes of records, padded to one length, whose checksums are computed at once."""

_LENGTH = np.dtype([("length", "<u8"), ("checksum", "<u4")])
_AROUND_DATA = 16


def are_small(sizes: np.ndarray) -> bool:
    """Returns whether records of these sizes in bytes, at least one, are read here."""
    return bool(sizes.mean() <= _MOST_MEAN and sizes.max() <= _MOST)


class RecordBlocks:
    """Records by their numbers."""

    def __init__(self, files: Sequence[str], file_numbers: np.ndarray, offsets: np.ndarray):
        """Keeps the arguments, those of `RecordPlaces`."""
        self._places = RecordPlaces(list(files), file_numbers, offsets)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads records, int64 [k], and verifies their checksums.

        Returns:
          bytes [k], of dtype object.

        Raises:
          DataError: If a record is damaged, or a file cannot be read.
        """
        found: list[bytes] = [b""] * len(indices)
        numbers = self._places.file_numbers[indices]
        for number in np.unique(numbers):
            of_file = np.flatnonzero(numbers == number)
            of_file = of_file[np.argsort(self._places.offsets[indices[of_file]], kind="stable")]
            try:
                with open(self._places.files[number], "rb", buffering=0) as file:
                    for place in of_file.tolist():
                        found[place] = self._whole(file.fileno(), int(indices[place]))
            except OSError as error:
                raise self._places.unreadable(number, error) from error
        step = max(1, _CHECKED_AT_ONCE // max(map(len, found)))
        for first in range(0, len(found), step):
            self._check(found[first : first + step], indices[first : first + step])
        records = np.empty(len(found), object)
        records[:] = [whole[12:-4] for whole in found]
        return records

    def _whole(self, file: int, index: int) -> bytes:
        """Reads a record with its length and checksums."""
        offset = int(self._places.offsets[index])
        head = os.pread(file, _MOST_MEAN, offset)
        size = int.from_bytes(head[:8], "little") + _AROUND_DATA
        if len(head) < size <= _MOST:
            head += os.pread(file, size - len(head), offset + len(head))
        if len(head) < size or size > _MOST:
            raise self._places.damaged(index)
        return head[:size]

    def _check(self, found: Sequence[bytes], indices: np.ndarray) -> None:
        heads = np.frombuffer(b"".join(whole[:12] for whole in found), _LENGTH)
        lengths = np.array([len(whole) - _AROUND_DATA for whole in found])
        data = np.zeros([len(found), max(int(lengths.max(initial=0)), 4)], np.uint8)
        for row, whole in zip(data, found, strict=True):
            if len(whole) > _AROUND_DATA:
                row[_AROUND_DATA - len(whole) :] = np.frombuffer(whole, np.uint8)[12:-4]
        written = np.frombuffer(b"".join(whole[-4:] for whole in found), "<u4")
        of_lengths = np.frombuffer(heads["length"].tobytes(), np.uint8).reshape(-1, 8)
        wrong = masked_crc32c(data, lengths) != written
        wrong |= masked_crc32c(of_lengths, np.full(len(found), 8)) != heads["checksum"]
        if wrong.any():
            raise self._places.damaged(int(indices[np.argmax(wrong)]))
