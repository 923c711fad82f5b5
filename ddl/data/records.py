"""TFRecord files with random access."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.decoded import DecodedSource
from ddl.data.source import checked_element_spec
from ddl.data.storage.record_blocks import RecordBlocks, suits_blocks
from ddl.errors import DataError, check_takes, definition_of

# A record is the length (8 bytes), the length's checksum (4), the data, the data's checksum (4).
_LENGTH_BYTES = 8
_AROUND_DATA = 16

_Decode = Callable[[tf.Tensor, tf.Tensor], Mapping[str, tf.Tensor]]


class RecordSource(DecodedSource):
    """TFRecord files with random access: fully shuffled epochs, and batches read independently.

    A run therefore resumes in the middle of an epoch at once, and each worker reads and decodes
    only its own rows. The constructor locates the records by reading their lengths, so the files
    must not be compressed. Records above 4 KiB on average, or in files of another machine, are read
    one by one. Reading suits storage with fast random access; for other storage, read shards with
    `StreamSource`.
    """

    def __init__(self, files: Sequence[str], decode: _Decode, num_examples: int | None = None):
        """Locates the records.

        Args:
          files: Paths that tf.io.gfile reads. Their order determines the numbers of the examples.
          decode: Decodes a record, string [], into a dict of features of static shape. Its second
            argument is a seed, int64 [2], for TensorFlow's stateless random operations; the seed
            depends on the run's seed, the epoch and the example. Traced by tf.data.
          num_examples: Number of examples to use, from the first on. None uses all.

        Raises:
          DataError: If `files` is empty; if a file is missing, truncated, compressed or of another
            format; if there are no records or fewer than `num_examples`; if `num_examples` is not
            positive; or if features are not of static shape.
        """
        if num_examples is not None and num_examples < 1:
            raise DataError(
                "RecordSource.num_examples must be at least 1, or None for all, got "
                f"{num_examples}."
            )
        if isinstance(files, str | bytes | os.PathLike):
            name = os.fsdecode(files)
            raise DataError(
                f"RecordSource.files must be a list of paths, got the single path {name!r}. Pass "
                f"[{name!r}], or tf.io.gfile.glob({name!r}) for a pattern."
            )
        files = [os.fsdecode(file) for file in files]
        if not files:
            raise DataError("RecordSource.files is empty. Pass at least one TFRecord file.")
        check_takes("RecordSource.decode", decode, ("record", "seed"))
        self._decode = decode
        file_numbers, offsets = _records(files, num_examples)
        if num_examples is not None and len(offsets) < num_examples:
            raise DataError(
                f"RecordSource.num_examples must be at most {len(offsets):,}, the number of "
                f"records in the {len(files)} files, got {num_examples:,}. The last file is "
                f"{files[-1]}."
            )
        if not len(offsets):
            raise DataError(
                f"The {len(files)} TFRecord files contain no records: {', '.join(files)}. "
                "Pass files that contain examples."
            )
        self._blocks: RecordBlocks | None = None
        if suits_blocks(files, file_numbers, offsets):
            self._blocks = RecordBlocks(files, file_numbers, offsets)
        with tf.init_scope(), tf.device("CPU:0"):
            # A graph captures eager tensors by reference.
            self._files = tf.constant(files)
            self._file_numbers, self._offsets = tf.constant(file_numbers), tf.constant(offsets)
        signature = [tf.TensorSpec([], tf.string), tf.TensorSpec([2], tf.int64)]
        example = tf.function(lambda *given: decode(*given), input_signature=signature)
        spec = example.get_concrete_function().structured_outputs
        if not isinstance(spec, Mapping):
            raise DataError(
                "RecordSource.decode must return a dict of features by name, got "
                f"{type(spec).__name__} from {definition_of(decode)}. Return a dict such as "
                "{'image': image, 'label': label}."
            )
        self._element_spec = checked_element_spec(
            {name: _spec_of(name, each) for name, each in spec.items()}
        )

    def __len__(self) -> int:
        """Returns the number of records used."""
        return len(self._offsets)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `DecodedSource`."""
        return dict(self._decode(self._record(index), seed))

    def _read_ahead(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Puts the records in place of their numbers, if they are small."""
        if self._blocks is None:
            return batches
        read_block = self._blocks.read

        @tf.autograph.experimental.do_not_convert
        def read(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            indices = batch.pop("index")  # each tensor costs time when the batch is taken apart
            records = tf.numpy_function(read_block, [indices], tf.string, stateful=False)
            records.set_shape(indices.shape)
            return {**batch, "record": records}

        return batches.map(read, num_parallel_calls=2, deterministic=True)

    def _example_of(self, row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Decodes a record that has been read ahead."""
        if "record" not in row:
            return super()._example_of(row)
        return dict(self._decode(row["record"], row["seed"]))

    def describe(self, index: int) -> str:
        """See `DecodedSource`."""
        file = self._files[self._file_numbers[index]].numpy().decode()
        return f"the record at byte {self._offsets[index].numpy():,} of {file}"

    def _record(self, index: tf.Tensor) -> tf.Tensor:
        """Reads one record, string []; TensorFlow verifies its checksums."""
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=self._files[self._file_numbers[index]][tf.newaxis],
            compression_type="",
            buffer_size=0,
            byte_offsets=self._offsets[index][tf.newaxis],
        )
        one = tf.data.experimental.from_variant(records, tf.TensorSpec([], tf.string)).take(1)
        return one.get_single_element()


def _spec_of(name: str, value: Any) -> Any:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return tf.type_spec_from_value(value)
    is_dense = isinstance(value, tf.Tensor)
    return tf.TensorSpec(value.shape, value.dtype, name) if is_dense else value


def _records(files: Sequence[str], enough: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns file number and byte offset of each record, both int64 [n], n ≤ `enough`."""
    found: list[np.ndarray] = []
    for file in files:
        missing = None if enough is None else enough - sum(map(len, found))
        if missing == 0:
            break
        found.append(_offsets(file)[:missing])
    numbers = [np.full(len(each), number, np.int64) for number, each in enumerate(found)]
    nothing = np.zeros(0, np.int64)
    return np.concatenate([nothing, *numbers]), np.concatenate([nothing, *found])


def _offsets(file: str) -> np.ndarray:
    """Returns the byte offsets of a file's records, int64 [n]."""
    offsets, offset = [], 0
    try:
        size = tf.io.gfile.stat(file).length
        # For local files, Python's own file objects are about ten times faster than GFile.
        local = os.path.exists(file)
        with open(file, "rb", buffering=0) if local else tf.io.gfile.GFile(file, "rb") as opened:
            while offset + _AROUND_DATA <= size:
                opened.seek(offset)
                offsets.append(offset)
                offset += _AROUND_DATA + int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    except (OSError, tf.errors.OpError) as error:
        raise DataError(f"{file} could not be read: {error}") from error
    if offset != size:
        begin, end = (offsets[-1], offset) if offset > size else (offset, offset + _AROUND_DATA)
        raise DataError(
            f"{file} is truncated, compressed, or not a TFRecord file: a record that begins at "
            f"byte {begin:,} would end at byte {end:,} or later, but the file has {size:,} bytes."
        )
    return np.asarray(offsets, np.int64)
