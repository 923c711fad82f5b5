"""Records of TFRecord and ArrayRecord files with random access, parsed as tf.train.Example.

A record of a TFRecord file is the length (8 bytes), the length's checksum (4), the data, and the
data's checksum (4). Reading all lengths once tells where the records begin.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from ddl.data.order import in_parts
from ddl.data.readers.paths import Paths, found_files
from ddl.data.source import Decode, Example, Source, first_line
from ddl.errors import DataError, installing

_HEAD, _TAIL = 12, 4  # bytes before and after a record's data


def tf_records(
    files: Paths, features: Mapping[str, Any] | None = None, decode: Decode | None = None
) -> Source:
    """Reads TFRecord files of this machine at any record, by an index in memory of 16 bytes each.

    Reading starts with the length of each record, which takes one access to the storage per record:
    seconds for a million records on a fast disk. Storage should be fast at random access. For other
    storage, read whole files by tf.data.TFRecordDataset and `ddl.data.stream`.

        features = {
            "jpeg": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64)
        }

        def decode(item, seed):
            image = tf.image.resize(tf.io.decode_jpeg(item["jpeg"], 3), [32, 32])
            return {"image": image, "label": item["label"]}

        source = ddl.data.tf_records("data/train-*", features, decode)

    Args:
      files: A path, a pattern such as "data/train-*", or a list of them. Files must not be
        compressed. The records of all files are numbered one after the other.
      features: Features of tf.train.Example by name, such as
        `tf.io.FixedLenFeature([28, 28], tf.float32)`; in a config, its arguments as a tuple:
        `{'image': ((28, 28), 'float32')}`. Other kinds, of varying length, must be made dense and
        of one shape by `decode`. None: an item is {"record": string []}.
      decode: Makes an example of the parsed features, or of the record, as in `Source`.

    Raises:
      DataError: If files or shards are missing, truncated, compressed or of another format, or the
        first record does not hold `features`. While reading: if the checksum of a record is wrong;
        names the file and the record.
    """
    return _source(TFRecords(found_files(files, "tf_records.files")), features, decode)


def array_records(
    files: Paths, features: Mapping[str, Any] | None = None, decode: Decode | None = None
) -> Source:
    """Reads ArrayRecord files (the extra `arrayrecord`), whose own index finds any record.

    Write them with the option "group_size:1", so that each record is read alone.

    Args:
      files: See `tf_records`.
      features: See `tf_records`.
      decode: See `tf_records`.

    Raises:
      DataError: If the package is not installed. Also as `tf_records`.
    """
    return _source(ArrayRecords(found_files(files, "array_records.files")), features, decode)


class _Records:
    """Records of files, numbered one after the other: items of a `Source`.

    Both formats have `rows`, which reads records, int64 [b], as the feature "record", bytes as
    objects [b]. It raises a DataError that names the file and the record if a checksum is wrong.

    Attributes:
      files: The paths.
    """

    def __init__(self, files: Sequence[str], counts: Sequence[int]):
        self.files, self._ends = list(files), np.cumsum(counts)

    def __len__(self) -> int:
        """Returns the number of records."""
        return int(self._ends[-1])

    def describe(self, index: int) -> str:
        """Returns the number and the file of a record, for messages."""
        number, place = in_parts(np.array(index), self._ends)
        return f"record {place:,} of {self.files[number]}"


class TFRecords(_Records):
    """The records of TFRecord files."""

    def __init__(self, files: Sequence[str]):
        """Reads the lengths of all records.

        Raises:
          DataError: If a file is truncated, compressed or of another format, or cannot be read.
        """
        with ThreadPoolExecutor(16) as pool:  # the threads wait for the storage
            places = list(pool.map(_located, files))
        super().__init__(files, list(map(len, places)))
        self._places = np.concatenate(places)  # offset and length of the data, int64 [n, 2]

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads records in the order in which they lie."""
        records = np.empty(len(indices), object)
        file_numbers, _ = in_parts(indices, self._ends)
        for number in np.unique(file_numbers):
            places = np.flatnonzero(file_numbers == number)
            with open(self.files[number], "rb", buffering=0) as file:
                for place in places[np.argsort(indices[places])].tolist():
                    index = int(indices[place])
                    offset, length = self._places[index].tolist()
                    records[place] = data = os.pread(file.fileno(), length, offset)
                    if _checksum(data) != os.pread(file.fileno(), _TAIL, offset + length):
                        raise DataError(
                            f"The checksum of {self.describe(index)} is wrong: it is damaged, or "
                            "the file has changed. Copy or write the file again."
                        )
        return {"record": records}


class ArrayRecords(_Records):
    """The records of ArrayRecord files, whose format checks their checksums."""

    def __init__(self, files: Sequence[str]):
        """Opens the files.

        Raises:
          DataError: If the package is not installed, or a file is not a whole ArrayRecord file.
        """
        try:
            from array_record.python.array_record_data_source import ArrayRecordDataSource
        except ImportError as error:
            raise DataError(f"array_records: {error}. {installing('arrayrecord')}") from error
        counts = []
        for file in files:
            try:
                counts.append(len(ArrayRecordDataSource(file)))
            except RuntimeError as error:
                text = f"{file} is truncated, or no ArrayRecord file: {first_line(error)}."
                raise DataError(text) from error
        super().__init__(files, counts)
        self._records = ArrayRecordDataSource(self.files)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads records by one call; see `TFRecords.rows`."""
        records, numbers = np.empty(len(indices), object), indices.tolist()
        try:
            records[:] = self._records.__getitems__(numbers)
        except RuntimeError as error:
            if len(numbers) == 1:
                text = f"Damaged is {self.describe(numbers[0])}: {first_line(error)}."
                raise DataError(text) from error
            for number in numbers:  # the error does not tell which record
                self.rows(np.array([number]))
            raise
        return {"record": records}


def _source(items: Any, features: Mapping[str, Any] | None, decode: Decode | None) -> Source:
    if not len(items):
        raise DataError(f"{', '.join(items.files):.200} must hold records, but holds none.")
    if features is None:
        return Source(items, decode, files=items.files)
    record = items.rows(np.zeros(1, np.int64))["record"][0]
    try:
        kinds = {  # a plain tuple comes from a config
            n: tf.io.FixedLenFeature(*f) if type(f) is tuple else f for n, f in features.items()
        }
        tf.io.parse_single_example(record, kinds)
    except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
        raise DataError(
            f"The features do not fit {items.describe(0)}: {first_line(error)}. Correct them."
        ) from error

    def parse(item: dict[str, tf.Tensor], seed: tf.Tensor) -> Example:
        example = tf.io.parse_single_example(item["record"], kinds)
        return example if decode is None else decode(example, seed)

    # Messages then name the user's function.
    return Source(items, functools.wraps(decode)(parse) if decode else parse, files=items.files)


def _located(file: str) -> np.ndarray:
    """Returns the offset and the length of the data of a file's records, int64 [n, 2]."""
    places = []
    try:
        size, offset = os.path.getsize(file), 0
        with open(file, "rb", buffering=0) as opened:
            while offset < size:
                head = os.pread(opened.fileno(), _HEAD, offset)
                if len(head) == _HEAD and _checksum(head[:8]) != head[8:]:
                    raise DataError(
                        f"{file} is compressed, damaged, or no TFRecord file: no record begins at "
                        f"{offset:,}."
                    )
                length = int.from_bytes(head[:8], "little")
                places.append((offset + _HEAD, length))
                offset += _HEAD + length + _TAIL
    except OSError as error:
        raise DataError(f"Reading records failed: {error}. Check the file.") from error
    if offset > size:
        raise DataError(
            f"{file} is truncated: record {len(places) - 1:,} would end at byte {offset:,}, but "
            f"the file has {size:,} bytes. Copy or write it again."
        )
    return np.array(places, np.int64).reshape(-1, 2)


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    rotated = (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
    return rotated.to_bytes(4, "little")
