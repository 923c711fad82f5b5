"""Cost of the input: python -m benchmarks.input.

Each kind of source yields batches of 256 rows in a new order in each epoch; the only computation is
a sum. Rows are images of 28×28 bytes, rows of 8 numbers, or lines of 1 to 63 tokens packed into
rows of 63. The benchmark compares ddl's sources with tf.data's pipelines, which shuffle in a buffer
of 10,000 (image folders: all files). tf.data packs no rows; its lines are joined and cut. Small
arrays, which ddl keeps on the devices, have no input; benchmarks.loop_overhead includes the cost of
gathering them.

JPEG images of 400×400 pixels are decoded in a window of 224×224 that is drawn for each example, in
batches of 64. ddl reads them from TFRecord files in a new order in each epoch; the bare decoder is
a map over their bytes in memory, in order, with a call for each core.

The rival of a PyDataset, which copies each batch, is a generator of the same batches. All pipelines
prefetch 4 batches: a larger buffer would fill up while the other pipeline is measured.

grain reads the arrays too, a row at a time, in its own order by its own threads; NumPy computes the
sum of its batches.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from benchmarks import harness
from benchmarks.harness import Contender, Options, Report, Table, Target, spread
from ddl import data, distribution
from ddl.step.replicas import distributed_iterator

BATCH, BUFFER, FILES, COLUMNS, WINDOW, STEPS = 256, 10_000, 8, 8, 64, 50
EXAMPLES = 57_600
NAMES = [f"x{number}" for number in range(COLUMNS)]
JPEG, JPEGS, JPEG_SIDE, CROP, JPEG_BATCH = "JPEG images", 256, 400, 224, 64


# ------------------------------------------------------------ the files


def images_of(folder: Path) -> np.ndarray:
    """Returns the images, uint8 [n, 28, 28, 1], mapped."""
    return np.load(folder / "images.npy", mmap_mode="r")


def files(folder: Path, name: str) -> list[str]:
    """Returns the paths of a kind of files."""
    return sorted(map(str, folder.glob(name)))


def write(count: int, folder: Path) -> None:
    """Writes rows in all formats, a multiple of `BATCH`."""
    from pyarrow import csv, parquet, table

    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28, 1), "u1")
    np.save(folder / "images.npy", images)
    for number, part in enumerate(np.array_split(images, FILES)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for image in part:
                writer.write(image.tobytes())
    for number, image in enumerate(images[: count // (4 * BATCH) * BATCH]):
        file = folder / "pictures" / str(number % 10) / f"{number:06}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(image).numpy())
    values = np.random.default_rng(1).random((count, COLUMNS), np.float32)
    columns = table(dict(zip(NAMES, values.T, strict=True)))
    csv.write_csv(columns, folder / "table.csv")
    parquet.write_table(columns, folder / "table.parquet")
    letters = np.random.default_rng(2).integers(97, 123, (count, WINDOW), "u1")
    lengths = np.random.default_rng(3).integers(1, WINDOW, count)
    lines = [row[:length].tobytes() for row, length in zip(letters, lengths, strict=True)]
    (folder / "lines.txt").write_bytes(b"\n".join(lines))
    side = JPEG_SIDE // 8  # noise that changes every 8 pixels
    with tf.io.TFRecordWriter(str(folder / "jpegs")) as writer:
        for image in np.random.default_rng(0).integers(0, 256, (JPEGS, side, side, 3), "u1"):
            pixels = np.repeat(np.repeat(image, 8, axis=0), 8, axis=1)
            writer.write(tf.io.encode_jpeg(pixels).numpy())


# ------------------------------------------------------------ decoders


def decode(record: tf.Tensor, seed: Any = None) -> dict[str, tf.Tensor]:
    """Decodes a record that holds only the bytes of an image."""
    return {"image": tf.reshape(tf.io.decode_raw(record, tf.uint8), [28, 28, 1])}


def cropped(record: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
    """Decodes the drawn window of a JPEG file."""
    corner = tf.random.stateless_uniform([2], seed, 0, JPEG_SIDE - CROP, tf.int32)
    window = tf.concat([corner, [CROP, CROP]], 0)
    pixels = tf.image.decode_and_crop_jpeg(record, window, channels=3)
    return {"image": tf.ensure_shape(pixels, [CROP, CROP, 3])}


def of_item(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a decoder of records as ddl calls it."""
    return lambda item, seed: function(item["record"], seed)


# ------------------------------------------------------------ sources and pipelines


def _stream(folder: Path) -> Any:
    def records(epoch: int) -> tf.data.Dataset:
        shuffled = tf.data.TFRecordDataset(files(folder, "*.tfrecord")).shuffle(BUFFER, epoch + 1)
        return shuffled.map(decode, num_parallel_calls=tf.data.AUTOTUNE)

    return data.stream(records)


class _Images(keras.utils.PyDataset):
    """The images in batches."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._images = images_of(folder)

    def __len__(self) -> int:
        """Returns the number of batches."""
        return len(self._images) // BATCH

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """Returns a batch."""
        return {"image": np.array(self._images[number * BATCH :][:BATCH])}


def _generated(folder: Path) -> tf.data.Dataset:
    batches, spec = _Images(folder), tf.TensorSpec([None, 28, 28, 1], tf.uint8)
    return tf.data.Dataset.from_generator(
        lambda: map(batches.__getitem__, range(len(batches))), output_signature={"image": spec}
    )


def _packed(folder: Path) -> Any:
    return data.packed(data.token_lines(str(folder / "lines.txt")), WINDOW - 1)


def _slices(folder: Path) -> tf.data.Dataset:
    slices = tf.data.Dataset.from_tensor_slices({"image": np.array(images_of(folder))})
    return slices.shuffle(BUFFER).batch(BATCH)


def _tf_records(folder: Path) -> tf.data.Dataset:
    records = tf.data.TFRecordDataset(files(folder, "*.tfrecord")).shuffle(BUFFER)
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)


def _listed(folder: Path) -> tf.data.Dataset:
    def read(file: tf.Tensor) -> dict[str, tf.Tensor]:
        image = tf.io.decode_png(tf.io.read_file(file), 1)
        return {"image": tf.ensure_shape(image, [28, 28, 1])}

    pictures = files(folder, "pictures/*/*.png")
    shuffled = tf.data.Dataset.from_tensor_slices(pictures).shuffle(len(pictures))
    return shuffled.map(read, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)


def _csv(folder: Path) -> tf.data.Dataset:
    given = {"column_defaults": [0.0] * COLUMNS, "num_epochs": 1, "shuffle_buffer_size": BUFFER}
    return tf.data.experimental.make_csv_dataset(str(folder / "table.csv"), BATCH, **given)


def _columns(folder: Path) -> tf.data.Dataset:
    import pandas

    columns = dict(pandas.read_parquet(folder / "table.parquet"))
    return tf.data.Dataset.from_tensor_slices(columns).shuffle(BUFFER).batch(BATCH)


def _joined_lines(folder: Path) -> tf.data.Dataset:
    def tokens(line: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.io.decode_raw(line, tf.uint8), tf.int64)

    lines = tf.data.TextLineDataset(str(folder / "lines.txt")).shuffle(BUFFER)
    rows = lines.map(tokens, num_parallel_calls=tf.data.AUTOTUNE).unbatch().batch(WINDOW - 1)
    return rows.padded_batch(BATCH).map(lambda token: {"token": token})


def _decoder(folder: Path) -> tf.data.Dataset:
    jpegs = [record.numpy() for record in tf.data.TFRecordDataset(str(folder / "jpegs"))]
    numbered = tf.data.Dataset.from_tensor_slices(jpegs).enumerate()
    return numbered.map(
        lambda number, jpeg: cropped(jpeg, tf.stack([number, 0])), os.cpu_count(), True
    ).batch(JPEG_BATCH)


class Kind(NamedTuple):
    """A kind of data: ddl's source in a folder, and another pipeline of one epoch in batches."""

    source: Callable[[Path], Any]
    rival: str
    dataset: Callable[[Path], tf.data.Dataset]


KINDS = {
    "arrays on the host": Kind(
        lambda f: data.Source({"image": np.array(images_of(f))}), "slices of arrays", _slices
    ),
    "mapped .npy file": Kind(
        lambda f: data.Source({"image": images_of(f)}), "slices of arrays", _slices
    ),
    "TFRecord files": Kind(
        lambda f: data.tf_records(files(f, "*.tfrecord"), decode=of_item(decode)),
        *("TFRecord files", _tf_records),
    ),
    "a stream": Kind(_stream, "TFRecord files", _tf_records),
    "a PyDataset": Kind(lambda f: data.stream(_Images(f)), "from_generator", _generated),
    "image folder, PNG": Kind(
        lambda f: data.image_folder(f / "pictures", (28, 28), channels=1),
        *("a map over listed files", _listed),
    ),
    "CSV table": Kind(lambda f: data.table(str(f / "table.csv")), "make_csv_dataset", _csv),
    "Parquet table": Kind(
        lambda f: data.table(str(f / "table.parquet")), "slices of pyarrow's columns", _columns
    ),
    "lines of tokens, packed": Kind(_packed, "lines joined and cut", _joined_lines),
    JPEG: Kind(
        lambda f: data.tf_records(str(f / "jpegs"), decode=of_item(cropped)),
        "bare decoder",
        _decoder,
    ),
}


CONTENDERS = {"ddl": "by_ddl", "tf.data": "by_tf_data", "grain": "by_grain"}
WITH_GRAIN = ("arrays on the host", "mapped .npy file")


# ------------------------------------------------------------ reading


def by_ddl(case: tuple[str, str]) -> Callable[[], float]:
    """Reads a kind from a folder by ddl."""
    name, folder = case
    tf.random.set_seed(1)  # tensor seeds require a global seed
    strategy = distribution.build_strategy("one_device")
    size = JPEG_BATCH if name == JPEG else BATCH
    pipeline = data.BatchPipeline(KINDS[name].source(Path(folder)), size, resident=False)
    return reading(distributed_iterator(pipeline, strategy))


def by_tf_data(case: tuple[str, str]) -> Callable[[], float]:
    """Reads a kind from a folder by the other pipeline."""
    name, folder = case
    tf.random.set_seed(1)
    return reading(iter(KINDS[name].dataset(Path(folder)).repeat().prefetch(4)))


class _Rows:
    """The images one by one, as grain reads them."""

    def __init__(self, images: np.ndarray) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"image": self._images[number]}


def by_grain(case: tuple[str, str]) -> Callable[[], float]:
    """Reads the images of a folder by grain, from memory or mapped."""
    name, folder = case
    harness.find_peer("grain")
    import grain

    images = images_of(Path(folder))
    rows = _Rows(images if "mapped" in name else np.array(images))
    shuffled = grain.MapDataset.source(rows).seed(1).shuffle().repeat().batch(BATCH)
    options = grain.ReadOptions(prefetch_buffer_size=4, num_threads=os.cpu_count() or 1)
    batches = iter(shuffled.to_iter_dataset(options))

    def take() -> None:
        sum(next(batches)["image"].reshape(BATCH, -1)[:, 0].sum(dtype=float) for _ in range(STEPS))

    return harness.timed(take, STEPS)


def reading(iterator: Any) -> Callable[[], float]:
    """Returns a window: the seconds of a batch of an iterator that is read in a graph."""

    @tf.function(autograph=False)
    def take() -> tf.Tensor:
        def add(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            for values in next(iterator).values():
                first = tf.reshape(values, [tf.shape(values)[0], -1])[:, 0]
                total += tf.reduce_sum(tf.cast(first, tf.float64))
            return number + 1, total

        start = tf.constant(0), tf.zeros([], tf.float64)
        return tf.while_loop(lambda number, _: number < STEPS, add, start)[1]

    return harness.timed(lambda: take().numpy(), STEPS)


def measure(options: Options) -> Report:
    """Measures one kind after the other."""
    rows, targets, notes = [], [], []
    with tempfile.TemporaryDirectory(prefix="input") as folder:
        write((EXAMPLES // 10 if options.quick else EXAMPLES) // BATCH * BATCH, Path(folder))
        for name in options.chosen(KINDS):
            contenders = {
                who: Contender(f"benchmarks.input:{function}", (name, folder))
                for who, function in CONTENDERS.items()
                if who != "grain" or name in WITH_GRAIN
            }
            times, failed = harness.compare(contenders, *((1, 1) if options.quick else (3, 5)))
            notes += [f"{name}, {why}." for why in failed]
            if not {"ddl", "tf.data"} <= times.keys():
                continue
            microseconds = [spread(times[who], 1e6) if who in times else "" for who in CONTENDERS]
            ratio = spread(times["tf.data"] / times["ddl"])
            rows.append([name, KINDS[name].rival, ratio, *microseconds])
            who, limit = ("the bare decoder's", 0.95) if name == JPEG else ("tf.data's", 1.0)
            targets.append(Target(f"{name}: ddl's speed / {who}", ratio, limit))
    columns = ["", "tf.data reads", "speed / tf.data's", "µs per batch, ddl", "tf.data", "grain"]
    return Report([Table("Batches", columns, rows)], targets, notes)


if __name__ == "__main__":
    harness.main(measure)
