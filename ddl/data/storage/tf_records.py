"""TFRecord files, whose records are read by their number.

A record is the length (8 bytes), the length's checksum (4), the data, the data's checksum (4). The
positions of the records are found by reading all lengths.
"""

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ddl.data.storage.large_records import LargeRecords, suit_batches
from ddl.data.storage.record_blocks import RecordBlocks, are_small
from ddl.errors import DataError

_LENGTH_BYTES = 8
_AROUND_DATA = 16


class TFRecordFiles:
    """The records of several files, numbered one after the other.

    Attributes:
      blocks: Reads many records at once; None if they are too large, or not on this machine.
    """

    def __init__(self, files: Sequence[str], enough: int | None = None):
        """Locates the records, or the first `enough` of them.

        Raises:
          DataError: If a file is missing, truncated, compressed or of another format.
        """
        file_numbers, offsets = _records(files, enough)
        with tf.init_scope(), tf.device("CPU:0"):
            # A graph captures eager tensors by reference.
            self._files = tf.constant(files)
            self._file_numbers, self._offsets = tf.constant(file_numbers), tf.constant(offsets)
        self.blocks: RecordBlocks | LargeRecords | None = None
        if len(offsets) and all(os.path.isfile(file) for file in files):
            sizes = _sizes(files, file_numbers, offsets)
            if are_small(sizes):
                self.blocks = RecordBlocks(files, file_numbers, offsets)
            elif suit_batches(sizes):
                self.blocks = LargeRecords(files, file_numbers, offsets)

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self._offsets)

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """Reads one record, string []; TensorFlow verifies its checksums."""
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=self._files[self._file_numbers[index]][tf.newaxis],
            compression_type="",
            buffer_size=0,
            byte_offsets=self._offsets[index][tf.newaxis],
        )
        one = tf.data.experimental.from_variant(records, tf.TensorSpec([], tf.string)).take(1)
        return one.get_single_element()

    def describe(self, index: int) -> str:
        """Returns what messages call a record."""
        file = self._files[self._file_numbers[index]].numpy().decode()
        return f"the record at byte {self._offsets[index].numpy():,} of {file}"


def _sizes(files: Sequence[str], file_numbers: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns the bytes of each record, from its offset to the next one or the end of its file."""
    ends = np.array([os.path.getsize(file) for file in files])[file_numbers]
    in_file = file_numbers[1:] == file_numbers[:-1]
    ends[:-1] = np.where(in_file, offsets[1:], ends[:-1])
    return ends - offsets


def _records(files: Sequence[str], enough: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns file number and byte offset of each record, both int64 [n], n ≤ `enough`."""
    found: list[np.ndarray] = []
    for file in files:
        missing = None if enough is None else enough - sum(map(len, found))
        if missing == 0:
            break
        found.append(_located(file)[:missing])
    numbers = [np.full(len(each), number, np.int64) for number, each in enumerate(found)]
    nothing = np.zeros(0, np.int64)
    return np.concatenate([nothing, *numbers]), np.concatenate([nothing, *found])


def _located(file: str) -> np.ndarray:
    """Returns the byte offsets of a file's records, int64 [n], found by reading their lengths."""
    offsets, offset = [], 0
    try:
        size = tf.io.gfile.stat(file).length
        # For local files, Python's own file objects are faster than GFile.
        local = os.path.exists(file)
        with open(file, "rb", buffering=0) if local else tf.io.gfile.GFile(file, "rb") as opened:
            while offset + _AROUND_DATA <= size:
                opened.seek(offset)
                offsets.append(offset)
                offset += _AROUND_DATA + int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    except (OSError, tf.errors.OpError) as error:
        raise DataError(
            f"{file} could not be read: {error}. Check the path, and that this process may read it."
        ) from error
    if offset != size:
        begin, end = (offsets[-1], offset) if offset > size else (offset, offset + _AROUND_DATA)
        raise DataError(
            f"{file} is truncated, compressed, or not a TFRecord file: a record that begins at "
            f"byte {begin:,} would end at byte {end:,} or later, but the file has {size:,} bytes. "
            "Copy it again, or decompress it: ddl reads TFRecord files without compression."
        )
    return np.asarray(offsets, np.int64)
