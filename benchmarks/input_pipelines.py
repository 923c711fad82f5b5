"""Cost of the input: python -m benchmarks.input_pipelines.

Each kind of source yields batches of 256 images of 28×28 bytes, in a new order in each epoch; the
only computation is a sum. The benchmark compares ddl's sources with the tf.data pipelines of the
tutorials: slices of arrays, and TFRecord files with a map that decodes, both with a shuffle buffer
of 10,000 and prefetching. Small arrays, which ddl keeps on the devices, have no input;
benchmarks.loop_overhead includes the cost of gathering them. The second table shows the time to the
first batch of a run that resumes in the middle of an epoch; the tutorials' pipelines start over
instead.

In the third table, JPEG images of 400×400 pixels are decoded in a window of 224×224 that is drawn
for each example, in batches of 64. ddl reads them from TFRecord files in a new order in each epoch;
the bare decoder is a map over their bytes in memory, in order, with a call for each core.
"""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from benchmarks import command, repeats
from benchmarks.report import Bar, Plot, Report, Series, Table
from ddl import data, distribution

EXAMPLES = 57_600
FILES = 8
BATCH = 256
BUFFER = 10_000
ROUNDS = 7
STEPS = 100
JPEGS, JPEG_SIDE, CROP, JPEG_BATCH, JPEG_STEPS = 256, 400, 224, 64, 20
DECODING, BARE = "ddl: TFRecord files of JPEG images", "bare decoder"
SLICES, RECORDS = "tf.data: slices of arrays", "tf.data: TFRecord files"
RIVALS = {
    "ddl: arrays on the host": SLICES,
    "ddl: look-ups in Python": SLICES,
    "ddl: TFRecord files": RECORDS,
    "ddl: a stream": RECORDS,
}


def decode(record: tf.Tensor, _: Any = None) -> dict[str, tf.Tensor]:
    """Decodes a record that holds only the bytes of an image."""
    return {"image": tf.reshape(tf.io.decode_raw(record, tf.uint8), [28, 28, 1])}


def written(folder: Path, images: np.ndarray) -> list[str]:
    """Writes images to TFRecord files and returns the paths."""
    files = [str(folder / f"part-{number}") for number in range(FILES)]
    for file, part in zip(files, np.array_split(images, FILES), strict=True):
        with tf.io.TFRecordWriter(file) as writer:
            for image in part:
                writer.write(image.tobytes())
    return files


def sources(images: np.ndarray, files: list[str]) -> list[data.Source]:
    """Returns ddl's sources in the order of `RIVALS`; the streams shuffle as tutorials do."""

    def stream(epoch: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(files).shuffle(BUFFER, seed=epoch + 1)
        return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE)

    return [
        data.ArraySource(image=images),
        data.RandomAccessSource(lambda index: {"image": images[index]}, len(images)),
        data.RecordSource(files, decode),
        data.StreamSource(stream, len(images), shuffle_buffer=1),
    ]


def tutorials(images: np.ndarray, files: list[str]) -> dict[str, tf.data.Dataset]:
    """Builds the tutorials' pipelines, repeated endlessly."""
    slices = tf.data.Dataset.from_tensor_slices({"image": images})
    records = tf.data.TFRecordDataset(files)
    parsed = records.shuffle(BUFFER).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    shuffled = {SLICES: slices.shuffle(BUFFER), RECORDS: parsed}
    return {
        name: dataset.repeat().batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        for name, dataset in shuffled.items()
    }


def encoded(count: int) -> list[bytes]:
    """Returns JPEG files of noise that changes every 8 pixels."""
    side = JPEG_SIDE // 8
    coarse = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), "u1")
    return [
        tf.io.encode_jpeg(np.repeat(np.repeat(image, 8, axis=0), 8, axis=1)).numpy()
        for image in coarse
    ]


def cropped(record: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
    """Decodes the drawn window of a JPEG file."""
    corner = tf.random.stateless_uniform([2], seed, 0, JPEG_SIDE - CROP, tf.int32)
    window = tf.concat([corner, [CROP, CROP]], 0)
    pixels = tf.image.decode_and_crop_jpeg(record, window, channels=3)
    return {"image": tf.ensure_shape(pixels, [CROP, CROP, 3])}


def decoding(
    folder: Path, steps: int, strategy: tf.distribute.Strategy
) -> dict[str, Callable[[], object]]:
    """Builds functions that decode `steps` batches, by ddl and by the bare decoder."""
    jpegs = encoded(JPEGS)
    with tf.io.TFRecordWriter(str(folder / "jpegs")) as writer:
        for jpeg in jpegs:
            writer.write(jpeg)
    source = data.RecordSource([str(folder / "jpegs")], cropped)
    ours = data.BatchPipeline(source, JPEG_BATCH, resident=False).iterator(strategy)
    numbered = tf.data.Dataset.from_tensor_slices(jpegs).repeat().enumerate()
    decoded = numbered.map(
        lambda number, jpeg: cropped(jpeg, tf.stack([number, 0])),
        num_parallel_calls=os.cpu_count(),
        deterministic=True,
    )
    bare = iter(decoded.batch(JPEG_BATCH).prefetch(2))
    return {DECODING: taking(ours, steps), BARE: taking(bare, steps)}


def taking(iterator: Any, steps: int = STEPS) -> Callable[[], object]:
    """Returns a function that reads `steps` batches of an iterator in a graph."""

    @tf.function(autograph=False)
    def take() -> tf.Tensor:
        def add(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            image = next(iterator)["image"]
            return number + 1, total + tf.reduce_sum(tf.cast(image[:, 0], tf.int64))

        start = tf.constant(0), tf.zeros([], tf.int64)
        return tf.while_loop(lambda number, _: number < steps, add, start)[1]

    return lambda: take().numpy()


def measure(quick: bool) -> Report:
    """Measures all sources."""
    strategy = distribution.build_strategy("one_device")
    tf.random.set_seed(1)  # tensor seeds require a global seed
    shape = (EXAMPLES // (10 if quick else 1), 28, 28, 1)
    images = np.random.default_rng(0).integers(0, 256, shape, "u1")
    rounds = 1 if quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        files = written(Path(folder), images)
        pipelines = {
            name: data.BatchPipeline(source, BATCH, resident=False)
            for name, source in zip(RIVALS, sources(images, files), strict=True)
        }
        iterators = {name: each.iterator(strategy) for name, each in pipelines.items()}
        iterators |= {name: iter(each) for name, each in tutorials(images, files).items()}
        windows = {name: taking(iterator) for name, iterator in iterators.items()}
        for window in windows.values():
            window()
        timed = {
            name: lambda window=window: repeats.seconds(window) / STEPS * 1e6
            for name, window in windows.items()
        }
        times = repeats.interleaved(timed, rounds)
        middle = len(images) // BATCH // 2

        def begin(pipeline: data.BatchPipeline) -> float:
            return repeats.seconds(lambda: next(pipeline.iterator(strategy, middle))) * 1e3

        begun = {name: functools.partial(begin, each) for name, each in pipelines.items()}
        beginnings = repeats.interleaved(begun, rounds)
        steps = 2 if quick else JPEG_STEPS
        decoders = decoding(Path(folder), steps, strategy)
        for window in decoders.values():
            window()
        speeds = repeats.interleaved(
            {
                name: lambda window=window: steps * JPEG_BATCH / repeats.seconds(window)
                for name, window in decoders.items()
            },
            rounds,
        )
    ratios = {
        name: repeats.ratio(times[RIVALS.get(name, name)] / found) for name, found in times.items()
    }
    rows = [
        [name, ratios[name], repeats.spread(found), repeats.spread(BATCH / found)]
        for name, found in times.items()
    ]
    started = [[name, repeats.spread(found)] for name, found in beginnings.items()]
    of_bare = repeats.ratio(speeds[DECODING] / speeds[BARE])
    jpegs = [
        [DECODING, of_bare, repeats.spread(speeds[DECODING])],
        [BARE, "–", repeats.spread(speeds[BARE])],
    ]
    bars = [name.removeprefix("ddl: ") for name in RIVALS]
    series = Series("", bars, [ratios[name] for name in RIVALS])
    return Report(
        [
            Table("Batches", ["", "speed / tf.data's", "µs per batch", "images per µs"], rows),
            Table("Start in the middle of an epoch", ["", "ms to the first batch"], started),
            Table("JPEG images", ["", "speed / the bare decoder's", "images/s"], jpegs),
        ],
        [] if quick else [Bar("JPEG images: ddl's speed / the bare decoder's", of_bare, 0.95)],
        plots=[Plot("Input", "", "speed / tf.data's with the same data", [series], level=1)],
    )


if __name__ == "__main__":
    command.main(measure, processes=3)
