"""The kinds of data that benchmarks.input_pipelines reads, by ddl and by others.

Each kind has the same rows for all: a source of ddl, a pipeline of tf.data that shuffles in a
buffer as tutorials do, and, where grain has a reader, grain's pipeline with its global shuffle.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.input_data import (
    BATCH,
    BUFFER,
    COLUMNS,
    MIXED,
    NAMES,
    WINDOW,
    Data,
    Kind,
    has_hugging_face,
    has_tfds,
)
from ddl import data


def decode(record: tf.Tensor) -> dict[str, tf.Tensor]:
    """Decodes a record that holds only the bytes of an image."""
    return {"image": tf.reshape(tf.io.decode_raw(record, tf.uint8), [28, 28, 1])}


# ------------------------------------------------------------ ddl


class Batches(keras.utils.PyDataset):
    """The images in batches, by Keras's class."""

    def __init__(self, images: np.ndarray):
        super().__init__()
        self._images = images

    def __len__(self) -> int:
        """Returns the number of batches."""
        return len(self._images) // BATCH

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """Returns a batch."""
        return {"image": self._images[number * BATCH : (number + 1) * BATCH]}


class Items:
    """The images one by one, as PyTorch's data sets have them."""

    def __init__(self, images: np.ndarray):
        self._images = images

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self._images)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """Returns an image."""
        return {"image": self._images[number]}


def _decode_item(item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
    return decode(item["record"])


def _arrays(given: Data) -> data.Source:
    return data.Source({"image": given.images})


def _items(given: Data) -> data.Source:
    return data.Source(Items(given.images))


def _mapped(given: Data) -> data.Source:
    return data.Source({"image": np.load(given.folder / "images.npy", mmap_mode="r")})


def _records(given: Data) -> data.Source:
    return data.tf_records(given.files("*.tfrecord"), decode=_decode_item)


def _array_records(given: Data) -> data.Source:
    return data.array_records(given.files("*.array_record"), decode=_decode_item)


def _pictures(given: Data) -> data.Source:
    return data.image_folder(given.folder / "pictures", (28, 28), channels=1)


def _csv(given: Data) -> data.Source:
    return data.table(str(given.folder / "table.csv"))


def _parquet(given: Data) -> data.Source:
    return data.table(str(given.folder / "table.parquet"))


def _hugging_face(given: Data) -> data.Source:
    from datasets import load_from_disk

    return data.Source(load_from_disk(given.folder / "hugging_face").with_format("numpy"))


def _tfds(given: Data) -> data.Source:
    import tensorflow_datasets as tfds

    folder = str(given.folder / "tfds" / "array_record")
    return data.Source(tfds.data_source("rows", split="train", data_dir=folder))


def _windows(given: Data) -> data.Source:
    return data.tokens(str(given.folder / "text.txt"), WINDOW - 1)


def _packed(given: Data) -> data.Source:
    return data.packed(data.token_lines(str(given.folder / "lines.txt")), WINDOW - 1)


def _halves_of_source(given: Data) -> list[data.Source]:
    half = len(given.images) // 2
    return [data.Source({"image": part}) for part in (given.images[:half], given.images[half:])]


def _joined(given: Data) -> data.Source:
    return data.concatenate(_halves_of_source(given))


def _mixture(given: Data) -> data.Source:
    return data.mix(_halves_of_source(given), MIXED["shares"])


def _generator(given: Data) -> data.Stream:
    return data.stream(_examples(given))


def _py_dataset(given: Data) -> data.Stream:
    return data.stream(Batches(given.images))


def _stream(given: Data) -> data.Stream:
    files = given.files("*.tfrecord")

    def records(epoch: int) -> tf.data.Dataset:
        shuffled = tf.data.TFRecordDataset(files).shuffle(BUFFER, seed=epoch + 1)
        return shuffled.map(decode, num_parallel_calls=tf.data.AUTOTUNE)

    return data.stream(records)


# ------------------------------------------------------------ tf.data


def _examples(given: Data) -> Callable[[], Iterator[dict[str, np.ndarray]]]:
    return lambda: ({"image": image} for image in given.images)


def _slices(given: Data) -> tf.data.Dataset:
    slices = tf.data.Dataset.from_tensor_slices({"image": given.images})
    return slices.shuffle(BUFFER).batch(BATCH)


def _tf_records(given: Data) -> tf.data.Dataset:
    records = tf.data.TFRecordDataset(given.files("*.tfrecord")).shuffle(BUFFER)
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)


def _listed(given: Data) -> tf.data.Dataset:
    def read(file: tf.Tensor) -> dict[str, tf.Tensor]:
        image = tf.io.decode_png(tf.io.read_file(file), 1)
        return {"image": tf.ensure_shape(image, [28, 28, 1])}

    files = tf.data.Dataset.from_tensor_slices(given.files("pictures/*/*.png"))
    shuffled = files.shuffle(len(given.images))
    return shuffled.map(read, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)


def _csv_dataset(given: Data) -> tf.data.Dataset:
    return tf.data.experimental.make_csv_dataset(
        str(given.folder / "table.csv"),
        BATCH,
        column_defaults=[0.0] * COLUMNS,
        num_epochs=1,
        shuffle_buffer_size=BUFFER,
    )


def _columns(given: Data) -> tf.data.Dataset:
    from pyarrow import parquet

    table = parquet.read_table(given.folder / "table.parquet")
    columns = {name: table[name].to_numpy() for name in NAMES}
    return tf.data.Dataset.from_tensor_slices(columns).shuffle(BUFFER).batch(BATCH)


def _to_tf_dataset(given: Data) -> tf.data.Dataset:
    from datasets import load_from_disk

    rows = load_from_disk(given.folder / "hugging_face")
    return rows.to_tf_dataset(batch_size=BATCH, shuffle=True)


def _tfds_dataset(given: Data) -> tf.data.Dataset:
    import tensorflow_datasets

    folder = given.folder / "tfds" / "tfrecord"
    builder = tensorflow_datasets.builder("rows", data_dir=folder)
    return builder.as_dataset("train", shuffle_files=True).shuffle(BUFFER).batch(BATCH)


def _slices_of_tokens(given: Data) -> tf.data.Dataset:
    tokens = np.frombuffer((given.folder / "text.txt").read_bytes(), np.uint8)
    size = WINDOW - 1
    count = (len(tokens) - 1) // size
    windows = {
        "token": tokens[: count * size].reshape(count, size),
        "next_token": tokens[1 : count * size + 1].reshape(count, size),
    }
    return tf.data.Dataset.from_tensor_slices(windows).shuffle(BUFFER).batch(BATCH)


def _token_lines(given: Data) -> tf.data.Dataset:
    def tokens(line: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.io.decode_raw(line, tf.uint8), tf.int64)

    lines = tf.data.TextLineDataset(str(given.folder / "lines.txt")).shuffle(BUFFER)
    return lines.map(tokens, num_parallel_calls=tf.data.AUTOTUNE)


def _tf_joined_lines(given: Data) -> tf.data.Dataset:
    rows = _token_lines(given).unbatch().batch(WINDOW - 1)
    return rows.padded_batch(BATCH).map(lambda token: {"token": token})


def _halves(given: Data) -> list[tf.data.Dataset]:
    half = len(given.images) // 2
    parts = given.images[:half], given.images[half:]
    return [tf.data.Dataset.from_tensor_slices({"image": part}) for part in parts]


def _concatenated(given: Data) -> tf.data.Dataset:
    first, second = _halves(given)
    return first.concatenate(second).shuffle(BUFFER).batch(BATCH)


def _sampled(given: Data) -> tf.data.Dataset:
    endless = [half.shuffle(BUFFER).repeat() for half in _halves(given)]
    mixed = tf.data.Dataset.sample_from_datasets(endless, MIXED["shares"])
    return mixed.take(len(given.images)).batch(BATCH)


def _from_generator(given: Data) -> tf.data.Dataset:
    spec = {"image": tf.TensorSpec([28, 28, 1], tf.uint8)}
    return tf.data.Dataset.from_generator(_examples(given), output_signature=spec).batch(BATCH)


def _of_batches(given: Data) -> tf.data.Dataset:
    batches = Batches(given.images)
    spec = {"image": tf.TensorSpec([BATCH, 28, 28, 1], tf.uint8)}
    each = lambda: (batches[number] for number in range(len(batches)))  # noqa: E731
    return tf.data.Dataset.from_generator(each, output_signature=spec)


# ------------------------------------------------------------ grain


def _grain(given: Data, rows: Any, decoded: Callable[[Any], dict[str, np.ndarray]]) -> Any:
    import grain

    shuffled = grain.MapDataset.source(rows).shuffle(seed=1).map(decoded)
    return shuffled.repeat().batch(BATCH).to_iter_dataset()


def _grain_arrays(given: Data) -> Any:
    return _grain(given, given.images, lambda image: {"image": image})


def _grain_mapped(given: Data) -> Any:
    mapped = np.load(given.folder / "images.npy", mmap_mode="r")
    return _grain(given, mapped, lambda image: {"image": np.array(image)})


def _grain_records(given: Data) -> Any:
    import grain

    def decoded(record: bytes) -> dict[str, np.ndarray]:
        return {"image": np.frombuffer(record, np.uint8).reshape(28, 28, 1)}

    files = grain.sources.ArrayRecordDataSource(given.files("*.array_record"))
    return _grain(given, files, decoded)


ARRAY_RECORDS = "ArrayRecord file"
SLICES, RECORDS, GENERATOR = "slices of arrays", "TFRecord files", "from_generator"
KINDS = {
    "arrays on the host": Kind(_arrays, SLICES, _slices, _grain_arrays),
    "items in Python": Kind(_items, SLICES, _slices, _grain_arrays),
    "mapped .npy file": Kind(_mapped, SLICES, _slices, _grain_mapped),
    "concatenation": Kind(_joined, "slices, concatenated", _concatenated),
    "mixture": Kind(_mixture, "sample_from_datasets", _sampled),
    "TFRecord files": Kind(_records, RECORDS, _tf_records),
    ARRAY_RECORDS: Kind(_array_records, RECORDS, _tf_records, _grain_records),
    "a stream": Kind(_stream, RECORDS, _tf_records),
    "image folder, PNG": Kind(_pictures, "a map over listed files", _listed),
    "CSV table": Kind(_csv, "make_csv_dataset", _csv_dataset),
    "Parquet table": Kind(_parquet, "slices of pyarrow's columns", _columns),
    "windows of tokens": Kind(_windows, "slices of windows", _slices_of_tokens),
    "lines of tokens, packed": Kind(_packed, "lines joined and cut", _tf_joined_lines),
    "Python generator": Kind(_generator, GENERATOR, _from_generator),
    "keras.utils.PyDataset": Kind(_py_dataset, "from_generator of batches", _of_batches),
}
if has_hugging_face():
    KINDS["Hugging Face data set"] = Kind(_hugging_face, "its to_tf_dataset", _to_tf_dataset)
if has_tfds():
    KINDS["TensorFlow Datasets, data source"] = Kind(_tfds, "its TFRecord files", _tfds_dataset)
