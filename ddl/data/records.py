"""TFRecord and ArrayRecord files with random access."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.decoded import DecodedSource
from ddl.data.source import checked_element_spec
from ddl.data.storage.array_records import ArrayRecordBlocks, ArrayRecordFiles, are_array_records
from ddl.data.storage.file_sets import check_files
from ddl.data.storage.large_records import LargeRecords
from ddl.data.storage.record_blocks import RecordBlocks
from ddl.data.storage.tf_records import TFRecordFiles
from ddl.errors import DataError, check_takes, definition_of

_Decode = Callable[[tf.Tensor, tf.Tensor], Mapping[str, tf.Tensor]]


class RecordSource(DecodedSource):
    """Files of records with random access: fully shuffled epochs, batches read independently.

    A run therefore resumes in the middle of an epoch at once, and each worker reads and decodes
    only its own rows. TFRecord files must not be compressed, since the constructor locates the
    records by reading their lengths. Files of the name `*.array_record` are ArrayRecord files (the
    extra `arrayrecord`), which are read by batch. TFRecords above 256 KiB on average, or in files
    of another machine, are read one by one, smaller ones by batch. On systems other than Linux the
    limit is 4 KiB. Reading suits storage with fast random access; for other storage, read shards
    with `StreamSource`.
    """

    def __init__(self, files: Sequence[str], decode: _Decode, num_examples: int | None = None):
        """Locates the records.

        Args:
          files: Paths that tf.io.gfile reads, all of one format. Their order determines the numbers
            of the examples.
          decode: Decodes a record, string [], into a dict of features of static shape. Its second
            argument is a seed, int64 [2], for TensorFlow's stateless random operations; the seed
            depends on the run's seed, the epoch and the example. Traced by tf.data.
          num_examples: Number of examples to use, from the first on. None uses all.

        Raises:
          DataError: If `files` is empty or lists a file twice; if a file is missing, truncated,
            compressed or of another format; if there are no records or fewer than `num_examples`;
            if `num_examples` is not positive; or if features are not of static shape.
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
        check_files(files, "RecordSource.files")
        check_takes("RecordSource.decode", decode, ("record", "seed"))
        self._decode = decode
        in_arrays = are_array_records(files)
        self._records: ArrayRecordFiles | TFRecordFiles = (
            ArrayRecordFiles(files) if in_arrays else TFRecordFiles(files, num_examples)
        )
        found = len(self._records)
        if num_examples is not None and found < num_examples:
            raise DataError(
                f"RecordSource.num_examples must be at most {found:,}, the number of records in "
                f"the {len(files)} files, got {num_examples:,}. The last file is {files[-1]}."
            )
        if not found:
            raise DataError(
                f"The {len(files)} files contain no records: {', '.join(files)}. Pass files that "
                "contain examples."
            )
        self._length = num_examples or found
        self.files_read = files
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
        return self._length

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return dict(self._element_spec)

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `DecodedSource`."""
        return dict(self._decode(self.record(index), seed))

    def _read_ahead(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Puts the records in place of their numbers, if they can be read by batch.

        Unless a subclass reads examples or records by their numbers itself.
        """
        if (blocks := self._blocks) is None:
            return batches
        read_block = blocks.read

        @tf.autograph.experimental.do_not_convert
        def read(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            indices = batch.pop("index")  # each tensor costs time when the batch is taken apart
            records = tf.numpy_function(read_block, [indices], tf.string, stateful=False)
            records.set_shape(indices.shape)
            return {**batch, "record": records}

        return batches.map(read, num_parallel_calls=2, deterministic=True)

    def _read_ahead_tolerantly(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """See `DecodedSource`. A batch with a damaged record has none."""
        if (blocks := self._blocks) is None:
            return batches
        read_block = blocks.read

        def found(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            try:
                return read_block(indices), np.ones(len(indices), bool)
            except DataError:
                return np.full(len(indices), b"", object), np.zeros(len(indices), bool)

        @tf.autograph.experimental.do_not_convert
        def read(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            dtypes = [tf.string, tf.bool]
            values = tf.numpy_function(found, [batch["index"]], dtypes, stateful=False)
            for value in values:
                value.set_shape(batch["index"].shape)
            return {**batch, "record": values[0], "is_read": values[1]}

        return batches.map(read, num_parallel_calls=2, deterministic=True)

    @property
    def _blocks(self) -> ArrayRecordBlocks | RecordBlocks | LargeRecords | None:
        """The reader of many records at once; None if they are read one by one."""
        own = type(self)
        is_changed = (own.example, own.record) != (RecordSource.example, RecordSource.record)
        return None if is_changed else getattr(self._records, "blocks", None)

    def _example_of(self, row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Decodes a record that has been read ahead."""
        if "record" not in row:
            return super()._example_of(row)
        return dict(self._decode(row["record"], row["seed"]))

    def describe(self, index: int) -> str:
        """See `DecodedSource`."""
        return self._records.describe(index)

    def record(self, index: tf.Tensor) -> tf.Tensor:
        """Reads a record without decoding it, string []; in a graph or eagerly.

        Args:
          index: Number of the example, int64 [].
        """
        return self._records.read(index)


def _spec_of(name: str, value: Any) -> Any:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return tf.type_spec_from_value(value)
    is_dense = isinstance(value, tf.Tensor)
    return tf.TensorSpec(value.shape, value.dtype, name) if is_dense else value
