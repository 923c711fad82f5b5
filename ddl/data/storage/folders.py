"""Writing of a source into a folder of records."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data.records import RecordSource
from ddl.data.source import Source
from ddl.data.storage.array_records import ENDING, array_record_module
from ddl.data.storage.file_sets import UNFINISHED
from ddl.data.storage.tf_records import write_index
from ddl.errors import ConfigError, DataError

DESCRIPTION = "features.json"

Format = Literal["array_record", "tfrecord"]

_DTYPES = (
    *("bool", "uint8", "uint16", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "string"),
)

_AT_ONCE = 64


class StoredSource(RecordSource):
    """A folder of records of all features, which its `features.json` describes."""


def store(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    record_format: Format = "tfrecord",
    shards: int = 1,
    progress: Callable[[int], None] = lambda written: None,
) -> list[str]:
    """Writes all examples of an epoch, in the order of the source, into a new folder.

    Records of a `RecordSource` are copied as they are, to be read with the same `decode` or the
    same features. Examples of other sources become records of `tf.train.Example` with the bytes of
    each feature, decoded, which `ddl.data.stored` reads; so does what it has read. TFRecord files
    get an index.

    Args:
      source: The examples; random augmentation is that of seed 0 in epoch 0.
      folder: A folder that does not exist or is empty.
      record_format: Format of the files.
      shards: Number of files.
      progress: Called with the number of examples written, now and then.

    Returns:
      The paths of the files.

    Raises:
      ConfigError: If the folder holds files, the number of files is out of range, or the examples
        depend on a run's batches.
      DataError: If the source is endless, a feature cannot be stored, or an example cannot be read.
    """
    if source.is_endless:
        raise DataError(
            "Data without a known length cannot be stored whole. Take a number of examples: "
            "StreamSource(dataset, num_examples=…)."
        )
    count, path = len(source), Path(folder)
    if not 1 <= shards <= count:
        raise ConfigError(f"The number of files must be from 1 to {count:,}, got {shards}.")
    _check_storable(source)
    if not source.has_numbered_examples and source.steps_per_epoch(count) != 1:
        raise ConfigError(
            f"A {type(source).__name__} cannot be stored, since its batches are of one length "
            "each. Store the data within it, and apply it to what was stored."
        )
    if source.depends_on_batches:
        raise ConfigError(
            f"A {type(source).__name__} whose shares change from a batch on (later_shares) cannot "
            "be stored, since its examples depend on the size of a run's batches. Store each of "
            "its sources, and mix what was stored."
        )
    if record_format == "array_record":
        array_record_module()  # before anything is written
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} must be a new or empty folder. Remove it, or pass another one.")
    path.mkdir(parents=True, exist_ok=True)
    records = _copied(source) if isinstance(source, RecordSource) else _serialized(source)
    ending = ENDING if record_format == "array_record" else ".tfrecord"
    names = [f"data-{shard:05}-of-{shards:05}{ending}" for shard in range(shards)]
    ends = [count * (shard + 1) // shards for shard in range(shards)]
    written = 0
    for name, end in zip(names, ends, strict=True):
        with _Writer(str(path / name), record_format) as write:
            while written < end:
                write(next(records))
                written += 1
                if written % _AT_ONCE == 0 or written == count:
                    progress(written)
        if record_format == "tfrecord":
            write_index(str(path / name))
    if is_described(source):
        described = {
            # Batches have weights in float32, whatever the data.
            name: {
                "dtype": "float32" if name == "weight" else spec.dtype.name,
                "shape": spec.shape.as_list(),
            }
            for name, spec in source.element_spec.items()
        }
        content = {"examples": count, "files": names, "features": described}
        (path / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n")
    return [str(path / name) for name in names]


def is_described(source: Source) -> bool:
    """Returns whether a folder that a source is stored in describes its features."""
    return isinstance(source, StoredSource) or not isinstance(source, RecordSource)


class _Writer:
    """A file of records, written in a `with` block and named when it is complete."""

    def __init__(self, file: str, record_format: Format):
        self._file, self._partial = file, f"{file}{UNFINISHED}"
        if record_format == "array_record":
            # Each record can be read alone; larger groups compress better and read slower.
            self._open: Any = array_record_module().ArrayRecordWriter(self._partial, "group_size:1")
        else:
            self._open = tf.io.TFRecordWriter(self._partial)

    def __enter__(self) -> Callable[[bytes], None]:
        return self._open.write

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._open.close()
        if kind is None:
            os.replace(self._partial, self._file)


def _check_storable(source: Source) -> None:
    if isinstance(source, RecordSource):
        return
    for name, spec in source.element_spec.items():
        if spec.dtype.name not in _DTYPES:
            raise DataError(
                f"Feature {name!r} has dtype {spec.dtype.name}, which cannot be stored. Cast it to "
                "another dtype."
            )
    if getattr(source, "shards", 1) > 1 and "weight" in source.element_spec:
        raise DataError(
            "A stream in shards whose examples have weights cannot be stored, since its padding "
            "cannot be told from examples of weight 0. Store the shards one by one."
        )


def _copied(source: RecordSource) -> Iterator[bytes]:
    records = tf.data.Dataset.range(len(source)).map(
        source.record, num_parallel_calls=os.cpu_count() or 1, deterministic=True
    )
    yield from records.as_numpy_iterator()


def _serialized(source: Source) -> Iterator[bytes]:
    shards = getattr(source, "shards", 1)
    size = shards * max(1, _AT_ONCE // shards)
    left = len(source)
    batches = source.batches(size, 0, seed=0, shuffle=False).take(source.steps_per_epoch(size))
    for batch in batches.as_numpy_iterator():
        # Padding stands at the end of an epoch, but at the end of each shard of a stream.
        kept = np.flatnonzero(batch["weight"] > 0) if shards > 1 else range(min(size, left))
        left -= len(kept)
        for row in kept:
            yield _example({name: batch[name][row] for name in source.element_spec})


def _example(features: Mapping[str, Any]) -> bytes:
    stored = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=_bytes(value)))
        for name, value in features.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=stored)).SerializeToString()


def _bytes(value: Any) -> list[bytes]:
    array = np.asarray(value) if not isinstance(value, bytes) else np.array(value, object)
    if array.dtype.kind in "OS":
        return [one if isinstance(one, bytes) else str(one).encode() for one in array.flat]
    return [array.astype(array.dtype.newbyteorder("<")).tobytes()]
