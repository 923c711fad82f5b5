"""Cost of the input: python -m benchmarks.input_pipelines.

Each kind of source yields batches of 256 rows in a new order in each epoch; the only computation is
a sum. Rows are images of 28×28 bytes, rows of 8 numbers, windows of 63 tokens, or lines of 1 to 63
tokens packed into rows of 63. The benchmark compares ddl's sources with tf.data's pipelines, which
shuffle in a buffer of 10,000 (image folders: all files; generators: not at all), and, where it has
a reader, with grain's, which shuffle fully like ddl's and are read in Python, after the two others.
tf.data packs no rows; its lines are joined and cut. tf.data has no reader of ArrayRecord, so the
same rows in TFRecord files stand beside it. Beside a data set of Hugging Face stands its
`to_tf_dataset`, which shuffles fully; beside the data source of TensorFlow Datasets, its reader of
TFRecord files.
Small arrays, which ddl keeps on the devices, have no input; benchmarks.loop_overhead includes the
cost of gathering them. The second table shows the time to the first batch of a run that resumes in
the middle of an epoch; tf.data's pipelines start over instead.

In the third table, JPEG images of 400×400 pixels are decoded in a window of 224×224 that is drawn
for each example, in batches of 64. ddl reads them from TFRecord files in a new order in each epoch;
the bare decoder is a map over their bytes in memory, in order, with a call for each core.
"""

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from benchmarks import command, input_data, repeats
from benchmarks.input_data import BATCH, Data, Kind
from benchmarks.input_kinds import ARRAY_RECORDS, KINDS
from benchmarks.report import Bar, Plot, Report, Series, Table
from ddl import data, distribution

EXAMPLES = 57_600
ROUNDS, STARTS = 5, 3
STEPS = 50
JPEGS, JPEG_SIDE, CROP, JPEG_BATCH, JPEG_STEPS = 256, 400, 224, 64, 20
DECODING, BARE = "ddl: TFRecord files of JPEG images", "bare decoder"
DDL, TF_DATA, GRAIN = "ddl", "tf.data", "grain"


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


def _cropped_item(item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
    return cropped(item["record"], seed)


def decoding(
    folder: Path, steps: int, strategy: tf.distribute.Strategy
) -> dict[str, Callable[[], object]]:
    """Builds functions that decode `steps` batches, by ddl and by the bare decoder."""
    jpegs = encoded(JPEGS)
    with tf.io.TFRecordWriter(str(folder / "jpegs")) as writer:
        for jpeg in jpegs:
            writer.write(jpeg)
    source = data.tf_records(str(folder / "jpegs"), decode=_cropped_item)
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
            for values in next(iterator).values():
                sums = tf.strings.length(values) if values.dtype == tf.string else values
                first = tf.reshape(sums, [tf.shape(sums)[0], -1])[:, 0]
                total += tf.reduce_sum(tf.cast(first, tf.float64))
            return number + 1, total

        start = tf.constant(0), tf.zeros([], tf.float64)
        return tf.while_loop(lambda number, _: number < steps, add, start)[1]

    return lambda: take().numpy()


def taking_in_python(iterator: Any, steps: int = STEPS) -> Callable[[], object]:
    """Returns a function that reads `steps` batches of images from an iterator of numpy arrays."""
    return lambda: sum(next(iterator)["image"][:, 0, 0, 0].sum(dtype=float) for _ in range(steps))


def _timed(windows: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Measures the microseconds per batch of each window, [rounds], after one that is left out."""
    for window in windows.values():
        window()
    timed = {
        name: lambda window=window: repeats.seconds(window) / STEPS * 1e6
        for name, window in windows.items()
    }
    return repeats.interleaved(timed, rounds)


def times_of(
    kind: Kind, given: Data, strategy: tf.distribute.Strategy, rounds: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Measures one kind.

    Returns:
      Microseconds per batch of each contender, [rounds], and milliseconds to a batch in the middle
      of an epoch, [starts].
    """
    pipeline = data.BatchPipeline(kind.source(given), BATCH, resident=False)
    others = kind.dataset(given).repeat().prefetch(tf.data.AUTOTUNE)
    windows = {DDL: taking(pipeline.iterator(strategy)), TF_DATA: taking(iter(others))}
    times = _timed(windows, rounds)
    if kind.grain is not None and input_data.has_grain():
        # After the others: grain's threads read up to 500 batches ahead, and run Python while the
        # window of another is measured.
        del others, windows
        gc.collect()
        times |= _timed({GRAIN: taking_in_python(iter(kind.grain(given)))}, rounds)
    middle = len(given.images) // BATCH // 2
    starts = [
        repeats.seconds(lambda: next(pipeline.iterator(strategy, middle))) * 1e3
        for _ in range(min(rounds, STARTS))
    ]
    return times, np.array(starts)


def decoded(folder: Path, strategy: tf.distribute.Strategy, quick: bool) -> dict[str, np.ndarray]:
    """Measures the JPEG images per second of ddl and of the bare decoder, [rounds]."""
    steps = 2 if quick else JPEG_STEPS
    decoders = decoding(folder, steps, strategy)
    for window in decoders.values():
        window()
    speeds = {
        name: lambda window=window: steps * JPEG_BATCH / repeats.seconds(window)
        for name, window in decoders.items()
    }
    return repeats.interleaved(speeds, 1 if quick else ROUNDS)


def measure(quick: bool) -> Report:
    """Measures all kinds."""
    strategy = distribution.build_strategy("one_device")
    tf.random.set_seed(1)  # tensor seeds require a global seed
    count = EXAMPLES // (10 if quick else 1) // BATCH * BATCH
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28, 1), "u1")
    has_grain = input_data.has_grain()
    kinds = {name: kind for name, kind in KINDS.items() if has_grain or name != ARRAY_RECORDS}
    rows, started, ratios = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        given = input_data.write(images, Path(folder), array_records=has_grain)
        for name, kind in kinds.items():
            times, starts = times_of(kind, given, strategy, 1 if quick else ROUNDS)
            gc.collect()  # ends the threads of its iterators
            ours = times[DDL]
            ratios.append(repeats.ratio(times[TF_DATA] / ours))
            beside = repeats.ratio(times[GRAIN] / ours) if GRAIN in times else "–"
            spreads = [
                repeats.spread(times[each]) if each in times else "–"
                for each in (DDL, TF_DATA, GRAIN)
            ]
            rows.append([name, kind.rival, ratios[-1], beside, *spreads])
            started.append([name, repeats.spread(starts)])
        speeds = decoded(Path(folder), strategy, quick)
    of_bare = repeats.ratio(speeds[DECODING] / speeds[BARE])
    jpegs = [
        [DECODING, of_bare, repeats.spread(speeds[DECODING])],
        [BARE, "–", repeats.spread(speeds[BARE])],
    ]
    columns = ["", "tf.data reads", "speed / tf.data's", "speed / grain's"]
    columns += ["µs per batch, ddl", "tf.data", "grain"]
    bars = [
        Bar(f"{name}: ddl's speed / tf.data's", each, 1.0)
        for name, each in zip(kinds, ratios, strict=True)
    ]
    return Report(
        [
            Table("Batches", columns, rows),
            Table("Start in the middle of an epoch", ["", "ms to the first batch"], started),
            Table("JPEG images", ["", "speed / the bare decoder's", "images/s"], jpegs),
        ],
        []
        if quick
        else [*bars, Bar("JPEG images: ddl's speed / the bare decoder's", of_bare, 0.95)],
        plots=[
            Plot(
                *("Input", "", "speed / tf.data's with the same data"),
                [Series("", list(kinds), ratios)],
                level=1,
            )
        ],
        notes=[
            note
            for is_there, note in (
                (
                    has_grain,
                    "grain: skipped, because it is not installed. Install it with "
                    "`make benchmarks/peers`.",
                ),
                (
                    input_data.has_hugging_face() and input_data.has_tfds(),
                    "Data sets of Hugging Face and TensorFlow Datasets: skipped where the package "
                    "is not installed. Run `make extras`, then "
                    "`.venv-extras/bin/python -m benchmarks input_pipelines`.",
                ),
            )
            if not is_there
        ],
    )


if __name__ == "__main__":
    command.main(measure, processes=3)
