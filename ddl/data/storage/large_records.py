"""Records of some kilobytes and more, of TFRecord files, read by batch.

A data set for each record, in a graph, takes longer than a record of 40 KiB takes to read.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import tf_record

from ddl.data.storage.record_places import RecordPlaces

_MOST_MEAN = 1 << 18
"""Mean size of the records of which some batches may lie in memory, in bytes."""

_MOST = 1 << 24
"""Size of the largest such record, in bytes."""

_THREADS = 4
"""Readers of a batch: storage answers several requests at once, and checksums take time."""

_FEWEST = 8
"""Records that occupy a reader longer than its thread takes to start."""


def suit_batches(sizes: np.ndarray) -> bool:
    """Returns whether records of these sizes in bytes, at least one, are read by batch."""
    return bool(sizes.mean() <= _MOST_MEAN and sizes.max() <= _MOST)


class LargeRecords:
    """Records by their numbers; TensorFlow reads them and verifies their checksums."""

    def __init__(self, files: Sequence[str], file_numbers: np.ndarray, offsets: np.ndarray):
        """Keeps the arguments, those of `RecordPlaces`."""
        self._places = RecordPlaces(list(files), file_numbers, offsets)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads records, int64 [k].

        Returns:
          bytes [k], of dtype object.

        Raises:
          DataError: If a record is damaged, or a file cannot be read.
        """
        records = np.empty(len(indices), object)
        # Each thread gets neighbours in the files, and opens each of its files once.
        order = np.lexsort((self._places.offsets[indices], self._places.file_numbers[indices]))
        parts = np.array_split(order, max(1, min(_THREADS, len(order) // _FEWEST)))
        with ThreadPoolExecutor(len(parts)) as pool:
            own = [indices[part] for part in parts]
            for part, found in zip(parts, pool.map(self._part, own), strict=True):
                records[part] = found
        return records

    def _part(self, indices: np.ndarray) -> np.ndarray:
        found = np.empty(len(indices), object)
        opened = -1
        reader: Any = None
        for place, index in enumerate(indices.tolist()):
            number = int(self._places.file_numbers[index])
            try:
                if number != opened:
                    # Not shared by threads: a reader has a position.
                    opened, reader = (
                        number,
                        tf_record.tf_record_random_reader(self._places.files[number]),
                    )
                found[place] = reader.read(int(self._places.offsets[index]))[0]
            except tf.errors.DataLossError as error:
                raise self._places.damaged(index) from error
            except (tf.errors.OpError, OSError, IndexError) as error:
                raise self._places.unreadable(number, error) from error
        return found
