"""Records of some kilobytes and more, of TFRecord files, read by batch.

A data set for each record, in a graph, takes longer than a record of 40 KiB takes to read.
TensorFlow's reader verifies checksums faster than numpy does, but reads 16 MiB from the place of a
record on. So it gets a file in memory, which holds only the records of the batch.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import tf_record

from ddl.data.storage.record_places import RecordPlaces

_MOST_MEAN = 1 << 18
"""Mean size of the records of which some batches may lie in memory, in bytes."""

_MOST = 1 << 24
"""Size of the largest such record, in bytes."""

_LENGTH_BYTES = 8
_AROUND_DATA = 16

_AT_ONCE = 16
"""Records that are copied before they are verified, which bounds the memory of the copies."""


def suit_batches(sizes: np.ndarray) -> bool:
    """Returns whether records of these sizes in bytes, at least one, are read by batch."""
    # Only Linux has files in memory.
    has_memory_files = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    return bool(has_memory_files and sizes.mean() <= _MOST_MEAN and sizes.max() <= _MOST)


class LargeRecords:
    """Records by their numbers; TensorFlow reads them and verifies their checksums."""

    def __init__(self, files: Sequence[str], file_numbers: np.ndarray, offsets: np.ndarray):
        """Keeps the arguments, those of `RecordPlaces`."""
        self._places = RecordPlaces(list(files), file_numbers, offsets)
        within = file_numbers[1:] == file_numbers[:-1]
        self._sizes = np.full(len(offsets), _MOST_MEAN)  # an estimate for the last one of a file
        self._sizes[:-1][within] = np.diff(offsets)[within]

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads records, int64 [k].

        Returns:
          bytes [k], of dtype object.

        Raises:
          DataError: If a record is damaged, or a file cannot be read.
        """
        records = np.empty(len(indices), object)
        # Neighbours in the files follow each other, and each file is opened once.
        order = np.lexsort((self._places.offsets[indices], self._places.file_numbers[indices]))
        self._request(indices[order])
        for first in range(0, len(order), _AT_ONCE):
            part = order[first : first + _AT_ONCE]
            records[part] = self._verified(indices[part])
        return records

    def _by_file(self, indices: np.ndarray) -> Iterator[tuple[int, Iterator[int]]]:
        return itertools.groupby(
            indices.tolist(), lambda index: int(self._places.file_numbers[index])
        )

    def _request(self, indices: np.ndarray) -> None:
        """Asks the storage for all records at once, without waiting for them."""
        for number, of_file in self._by_file(indices):
            # Reading the record reports what fails here.
            with contextlib.suppress(OSError), open(self._places.files[number], "rb") as file:
                for index in of_file:
                    offset, size = int(self._places.offsets[index]), int(self._sizes[index])
                    os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)

    def _verified(self, indices: np.ndarray) -> list[bytes]:
        """Reads records, sorted by file, and verifies their checksums."""
        copy = os.memfd_create("records")
        try:
            places = self._copied(indices, copy)
            reader = tf_record.tf_record_random_reader(f"/proc/self/fd/{copy}")
            found = []
            for index, place in zip(indices.tolist(), places, strict=True):
                try:
                    found.append(reader.read(place)[0])
                except (tf.errors.DataLossError, IndexError) as error:
                    raise self._places.damaged(index) from error
            return found
        finally:
            os.close(copy)

    def _copied(self, indices: np.ndarray, copy: int) -> list[int]:
        """Appends records to a file, and returns the offset of each in it."""
        places, end = [], 0
        for number, of_file in self._by_file(indices):
            try:
                with open(self._places.files[number], "rb", buffering=0) as file:
                    for index in of_file:
                        places.append(end)
                        end += os.write(copy, self._whole(index, file.fileno()))
            except OSError as error:
                raise self._places.unreadable(number, error) from error
        return places

    def _whole(self, index: int, file: int) -> bytes:
        """Reads a record with its length and checksums, and verifies none of them."""
        offset = int(self._places.offsets[index])
        size = int.from_bytes(os.pread(file, _LENGTH_BYTES, offset), "little") + _AROUND_DATA
        # A damaged length may be any number; the files have no record of more than _MOST.
        whole = os.pread(file, size, offset) if size <= _MOST else b""
        if len(whole) < size:
            raise self._places.damaged(index)
        return whole
