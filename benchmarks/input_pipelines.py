"""What the input costs: python -m benchmarks.input_pipelines.

Batches of 256 images of 28×28 bytes are taken from each kind of source, in an order that is new in
each epoch, and nothing is computed with them but a sum. Beside ddl's sources stand what tutorials
write with tf.data: slices of arrays, and TFRecord files with a map that decodes, both with a
shuffle buffer of 10,000, and prefetching. The second table tells how long the first batch takes
of a run that goes on in the middle of an epoch; the tutorials' pipelines begin anew instead.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from benchmarks import report
from benchmarks.report import Plot, Report, Series, Table
from ddl import data, distribution

EXAMPLES = 57_600
FILES = 8
BATCH = 256
BUFFER = 10_000
ROUNDS = 7
STEPS = 100
SLICES, RECORDS = "tf.data: slices of arrays", "tf.data: TFRecord files"
RESIDENT = "ddl: arrays on the device"

Source = data.Source


def decode(record: tf.Tensor, _: Any = None) -> dict[str, tf.Tensor]:
    """Of a record that holds the bytes of an image alone."""
    return {"image": tf.reshape(tf.io.decode_raw(record, tf.uint8), [28, 28, 1])}


def written(folder: Path, images: np.ndarray) -> list[str]:
    """TFRecord files of them."""
    files = [str(folder / f"part-{number}") for number in range(FILES)]
    for file, part in zip(files, np.array_split(images, FILES), strict=True):
        with tf.io.TFRecordWriter(file) as writer:
            for image in part:
                writer.write(image.tobytes())
    return files


def sources(images: np.ndarray, files: list[str]) -> dict[str, Source]:
    """ddl's, by name; that of the streams shuffles as tutorials do."""

    def stream(epoch: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(files).shuffle(BUFFER, seed=epoch + 1)
        return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE)

    return {
        RESIDENT: data.ArraySource(image=images),
        "ddl: arrays on the host": data.ArraySource(image=images),
        "ddl: look-ups in Python": data.RandomAccessSource(
            lambda index: {"image": images[index]}, len(images)
        ),
        "ddl: TFRecord files": data.RecordSource(files, decode),
        "ddl: a stream": data.StreamSource(stream, len(images)),
    }


def tutorials(images: np.ndarray, files: list[str]) -> dict[str, tf.data.Dataset]:
    """Batches without end."""
    slices = tf.data.Dataset.from_tensor_slices({"image": images})
    records = tf.data.TFRecordDataset(files)
    parsed = records.shuffle(BUFFER).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    shuffled = {SLICES: slices.shuffle(BUFFER), RECORDS: parsed}
    return {
        name: dataset.repeat().batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        for name, dataset in shuffled.items()
    }


def taking(batch: Callable[[Any], tf.Tensor], iterator: Any) -> Callable[[], object]:
    """Takes `STEPS` batches from an iterator in a graph."""

    @tf.function(autograph=False)
    def take() -> tf.Tensor:
        def add(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            image = batch(next(iterator))
            return number + 1, total + tf.reduce_sum(tf.cast(image[:, 0], tf.int64))

        start = tf.constant(0), tf.zeros([], tf.int64)
        return tf.while_loop(lambda number, _: number < STEPS, add, start)[1]

    return lambda: take().numpy()


def measure(quick: bool) -> Report:
    """All sources."""
    strategy = distribution.build_strategy("one_device")
    tf.random.set_seed(1)  # a seed that is a tensor needs one
    shape = (EXAMPLES // (10 if quick else 1), 28, 28, 1)
    images = np.random.default_rng(0).integers(0, 256, shape, "u1")
    with tempfile.TemporaryDirectory() as folder:
        files = written(Path(folder), images)
        pipelines = {
            name: data.BatchPipeline(source, BATCH, resident=name == RESIDENT)
            for name, source in sources(images, files).items()
        }
        windows = {}
        for name, pipeline in pipelines.items():
            arrays = pipeline.resident_arrays(strategy)

            def batch(element: Any, pipeline: Any = pipeline, arrays: Any = arrays) -> tf.Tensor:
                return strategy.run(pipeline.examples, (element, arrays))["image"]

            windows[name] = taking(batch, pipeline.iterator(strategy))
        for name, dataset in tutorials(images, files).items():
            windows[name] = taking(lambda element: element["image"], iter(dataset))
        for window in windows.values():
            window()
        timed = {
            name: lambda window=window: report.seconds(window) / STEPS * 1e6
            for name, window in windows.items()
        }
        times = report.interleaved(timed, 1 if quick else ROUNDS)
        middle = len(images) // BATCH // 2
        begun = {
            name: lambda pipeline=pipeline: (
                1e3 * report.seconds(lambda: next(pipeline.iterator(strategy, middle)))
            )
            for name, pipeline in pipelines.items()
        }
        beginnings = report.interleaved(begun, 1 if quick else ROUNDS)
    rows = [
        [
            name,
            report.spread(
                times[RECORDS if "files" in name or "stream" in name else SLICES] / found
            ),
            report.spread(found),
            report.spread(BATCH / found),
        ]
        for name, found in times.items()
    ]
    columns = ["", "speed, of tf.data's", "µs a batch", "images a µs"]
    started = [[name, report.spread(found)] for name, found in beginnings.items()]
    bars = [(str(row[0]).replace(": ", ":\n"), row[1]) for row in rows if str(row[0])[:3] == "ddl"]
    series = Series("", [name for name, _ in bars], [value for _, value in bars])
    return Report(
        [
            Table("Batches", columns, rows),
            Table("From the middle of an epoch", ["", "ms to the first batch"], started),
        ],
        plots=[Plot("Input", "", "speed, of tf.data's with the same data", [series], level=1)],
    )


if __name__ == "__main__":
    report.main(measure)
