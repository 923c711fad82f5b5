"""ArrayRecord files, which find a record by its number (the extra `arrayrecord`)."""

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.locking import one_at_a_time
from ddl.errors import DataError, installing

ENDING = ".array_record"


def are_array_records(files: Sequence[str]) -> bool:
    """Returns whether these are ArrayRecord files.

    Raises:
      DataError: If only some of them are.
    """
    of_array = [file for file in files if file.endswith(ENDING)]
    if of_array and len(of_array) < len(files):
        other = next(file for file in files if not file.endswith(ENDING))
        raise DataError(
            f"All files must be of one format, but {of_array[0]} is an ArrayRecord file and "
            f"{other} is not. Pass them as two sources to ddl.data.concatenation."
        )
    return bool(of_array)


class ArrayRecordFiles:
    """The records of several files, numbered one after the other."""

    def __init__(self, files: Sequence[str]):
        """Opens the files.

        Raises:
          DataError: If the package or a file is missing, or a file is damaged.
        """
        self._files = list(files)
        self._readers = [_opened(file) for file in files]
        self._ends = np.cumsum([reader.num_records() for reader in self._readers])
        # The package does not say that threads may share a reader.
        self._locks = [threading.Lock() for _ in files]

    def __len__(self) -> int:
        """Returns the number of records."""
        return int(self._ends[-1])

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """Reads one record, string []; the format verifies its checksums."""
        record = tf.numpy_function(self._read, [index], tf.string, stateful=False)
        return tf.ensure_shape(record, [])

    def describe(self, index: int) -> str:
        """Returns what messages call a record."""
        file, number = self._place(index)
        return f"record {number:,} of {self._files[file]}"

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, int(index) - (int(self._ends[file - 1]) if file else 0)

    def _read(self, index: Any) -> Any:
        file, number = self._place(int(index))
        try:
            with one_at_a_time(self._locks[file]):
                (record,) = self._readers[file].read([number])
        except (OSError, ValueError, RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{self.describe(int(index))} cannot be read: {reason}. Replace the file, or leave "
                "such records out with ddl.data.skip_damaged."
            ) from error
        return np.array(record, object)


def array_record_module() -> Any:
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
    module = array_record_module()
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
