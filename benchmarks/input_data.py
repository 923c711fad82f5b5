"""Rows that benchmarks.input_pipelines reads, written in all formats."""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.report import PEERS
from ddl import data

BATCH, BUFFER, FILES, COLUMNS, WINDOW = 256, 10_000, 8, 8, 64
MIXED = {"shares": [0.4, 0.6]}
NAMES = [f"x{number}" for number in range(COLUMNS)]


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the rows lie.

    Attributes:
      images: uint8 [n, 28, 28, 1], where n is a multiple of `BATCH`.
      folder: Holds the files that `write` made of them, and of tables and text.
    """

    images: np.ndarray
    folder: Path

    def files(self, name: str) -> list[str]:
        """Returns the paths of a kind of files."""
        return sorted(map(str, self.folder.glob(name)))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of data.

    Attributes:
      source: Returns ddl's source.
      rival: Name of the other pipeline.
      dataset: Returns the other pipeline of one epoch, in batches of `BATCH`.
      grain: Returns grain's endless pipeline in batches, None where it has no reader.
    """

    source: Callable[[Data], data.Source | data.Stream]
    rival: str
    dataset: Callable[[Data], tf.data.Dataset]
    grain: Callable[[Data], Any] | None = None


def has_grain() -> bool:
    """Returns whether grain and ArrayRecord are installed, and lets them be imported."""
    if not (PEERS / "grain").exists():
        return False
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    return True


def has_hugging_face() -> bool:
    """Returns whether Hugging Face's `datasets` is installed."""
    return importlib.util.find_spec("datasets") is not None


def has_tfds() -> bool:
    """Returns whether TensorFlow Datasets and ArrayRecord are installed."""
    packages = ("tensorflow_datasets", "array_record")
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _write_tfds(values: np.ndarray, folder: Path) -> None:
    """Writes rows, float32 [n, COLUMNS], by TensorFlow Datasets, in both of its formats."""
    import tensorflow_datasets as tfds

    for file_format in ("array_record", "tfrecord"):
        tfds.dataset_builders.store_as_tfds_dataset(
            name="rows",
            version="1.0.0",
            features=tfds.features.FeaturesDict(
                {"x": tfds.features.Tensor(shape=(COLUMNS,), dtype=np.float32)}
            ),
            split_datasets={"train": tf.data.Dataset.from_tensor_slices({"x": values})},
            data_dir=folder / "tfds" / file_format,
            file_format=file_format,
        )


def write(images: np.ndarray, folder: Path, *, array_records: bool) -> Data:
    """Writes the rows in all formats.

    Args:
      images: uint8 [n, 28, 28, 1].
      folder: Gets the files.
      array_records: Whether ArrayRecord files are written too.
    """
    from pyarrow import csv, parquet, table

    for number, part in enumerate(np.array_split(images, FILES)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for image in part:
                writer.write(image.tobytes())
    if array_records:
        from array_record.python.array_record_module import ArrayRecordWriter

        records = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1")
        for image in images:
            records.write(image.tobytes())
        records.close()
    np.save(folder / "images.npy", images)
    for number, image in enumerate(images[: len(images) // (4 * BATCH) * BATCH]):
        file = folder / "pictures" / str(number % 10) / f"{number:06}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(image).numpy())
    values = np.random.default_rng(1).random((len(images), COLUMNS), np.float32)
    columns = table(dict(zip(NAMES, values.T, strict=True)))
    csv.write_csv(columns, folder / "table.csv")
    parquet.write_table(columns, folder / "table.parquet")
    if has_hugging_face():
        from datasets import Dataset

        rows = Dataset.from_dict(dict(zip(NAMES, values.T, strict=True)))
        rows.save_to_disk(folder / "hugging_face")
    if has_tfds():
        _write_tfds(values, folder)
    letters = np.random.default_rng(2).integers(97, 123, (len(images), WINDOW), "u1")
    letters[:, -1] = 10
    (folder / "text.txt").write_bytes(letters.tobytes())
    lengths = np.random.default_rng(3).integers(1, WINDOW, len(images))
    lines = [row[:length].tobytes() for row, length in zip(letters, lengths, strict=True)]
    (folder / "lines.txt").write_bytes(b"\n".join(lines))
    return Data(images, folder)
