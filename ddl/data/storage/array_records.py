"""ArrayRecord files, which find a record by its number (the extra `arrayrecord`)."""

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.locking import one_at_a_time
from ddl.errors import DataError, installing
from ddl.user_code import repeats

_ENDING = ".array_record"


def are_array_records(files: Sequence[str]) -> bool:
    """Returns whether these are ArrayRecord files.

    Raises:
      DataError: If only some of them are.
    """
    of_array = [file for file in files if file.endswith(_ENDING)]
    if of_array and len(of_array) < len(files):
        other = next(file for file in files if not file.endswith(_ENDING))
        raise DataError(
            f"All files must be of one format, but {of_array[0]} is an ArrayRecord file and "
            f"{other} is not. Pass them as two sources to ddl.data.concatenation."
        )
    return bool(of_array)


class ArrayRecordFiles:
    """The records of several files, numbered one after the other.

    Attributes:
      blocks: Reads the records of a batch in one call.
    """

    def __init__(self, files: Sequence[str]):
        """Opens the files.

        Raises:
          DataError: If the package or a file is missing, or a file is damaged.
        """
        self.blocks = ArrayRecordBlocks(files)

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self.blocks)

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """Reads one record, string []; the format verifies its checksums."""
        (record,) = tf.unstack(self._read_block(index[tf.newaxis]), num=1)
        return record

    def describe(self, index: int) -> str:
        """Returns what messages call a record."""
        return self.blocks.describe(index)

    def _read_block(self, indices: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(self.blocks.read, [indices], tf.string, stateful=False)


class ArrayRecordBlocks:
    """Records by their numbers, several in one call: a call in Python costs more than a record."""

    def __init__(self, files: Sequence[str]):
        """Opens the files; see `ArrayRecordFiles`."""
        self._files = list(files)
        self._readers = [_opened(file) for file in files]
        self._ends = np.cumsum([reader.num_records() for reader in self._readers])
        # The package does not say that threads may share a reader.
        self._locks = [threading.Lock() for _ in files]

    def __len__(self) -> int:
        """Returns the number of records."""
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads records, int64 [k]; the format verifies their checksums.

        Returns:
          bytes [k], of dtype object.

        Raises:
          DataError: If a record is damaged; names the first one of its file.
        """
        found = np.empty(len(indices), object)
        in_files = np.searchsorted(self._ends, indices, side="right")
        for file in np.unique(in_files).tolist():
            places = np.flatnonzero(in_files == file).tolist()
            numbers = [int(indices[place]) - self._first(file) for place in places]
            found[places] = self._records_of(file, numbers)
        return found

    def describe(self, index: int) -> str:
        """Returns what messages call a record."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self._described(file, int(index) - self._first(file))

    def _first(self, file: int) -> int:
        return int(self._ends[file - 1]) if file else 0

    def _described(self, file: int, number: int) -> str:
        return f"record {number:,} of {self._files[file]}"

    def _records_of(self, file: int, numbers: list[int]) -> list[bytes]:
        try:
            with one_at_a_time(self._locks[file]):
                return list(self._readers[file].read(numbers))
        except (OSError, ValueError, RuntimeError, IndexError) as error:
            if not repeats(error):  # a failure of the system, which may pass
                raise
            if len(numbers) > 1:  # the error does not tell which one
                return [self._records_of(file, [number])[0] for number in numbers]
            reason = " ".join(str(error).split())
            raise DataError(
                f"{self._described(file, numbers[0])} cannot be read: {reason}. Replace the file, "
                "or leave such records out with ddl.data.skip_damaged."
            ) from error


def _array_record_module() -> Any:
    """Imports the package.

    Raises:
      DataError: If it is not installed.
    """
    try:
        from array_record.python import array_record_module as module
    except ImportError as error:
        raise DataError(
            "ArrayRecord files need the package array_record, which could not be imported: "
            f"{error}. {installing('arrayrecord')} Or write TFRecord files."
        ) from error
    return module


def _opened(file: str) -> Any:
    module = _array_record_module()
    if not os.path.isfile(file):
        raise DataError(f"The ArrayRecord file {file!r} was not found. Correct the path.")
    try:
        reader = module.ArrayRecordReader(file, "readahead_buffer_size:0,max_parallelism:0")
        if not reader.ok():
            reader.read([0])  # mostly says why
            raise ValueError("it is truncated, or of another format")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{file} could not be read as an ArrayRecord file: {reason}. Copy or write it again."
        ) from error
    return reader
