"""Where the records of several files lie, and errors that name them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ddl.errors import DataError


@dataclasses.dataclass(frozen=True)
class RecordPlaces:
    """Places of records, numbered one file after the other.

    Attributes:
      files: Paths on this machine.
      file_numbers: The file of each record, int64 [n].
      offsets: First byte of each record in its file, int64 [n].
    """

    files: Sequence[str]
    file_numbers: np.ndarray
    offsets: np.ndarray

    def damaged(self, index: int) -> DataError:
        """Returns the error for a record whose length or checksums are wrong."""
        file, offset = self.files[self.file_numbers[index]], self.offsets[index]
        return DataError(
            f"{file} is damaged: the record at byte {offset:,} must have the length and checksum "
            "written with it, but has not. Replace the file, or leave such records out with "
            "ddl.data.skip_damaged."
        )

    def unreadable(self, file_number: int, error: Exception) -> DataError:
        """Returns the error for a file that cannot be read."""
        return DataError(
            f"{self.files[file_number]} could not be read: {error}. Check that the file still "
            "exists, and that this process may read it."
        )
