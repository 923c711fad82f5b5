"""A table of a million rows and a folder of 100,000 images: python -m benchmarks.large_data.

The table is a Parquet file of 16 columns of numbers and a label. The images are JPEG files of 32×32
pixels in ten folders, one for each class. The benchmark makes both in a temporary folder. A linear
classifier trains with SGD in batches of 256, so that nearly all time goes to the data.

ddl reads them with `ddl.data.table` and `ddl.data.ImageFolder`. The alternatives train the same
model by the function of Keras's `fit` that makes 50 updates in one execution. For the table,
pyarrow reads the columns, and slices of the arrays are shuffled in a buffer of 10,000. For the
images, the list of files is shuffled and a map with as many calls as tf.data chooses reads and
decodes them; or `keras.utils.image_dataset_from_directory` does, which shuffles the list of files
once an epoch.

Each figure comes from fresh processes, which run one at a time, in turns. The first step counts
from the end of the imports to the end of the first update, with tracing. Images per second are
those of the updates that follow it. The memory is the peak resident memory of the process. The
files were written shortly before, so they are read from the page cache.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command
from benchmarks.memory import megabytes
from benchmarks.repeats import over_processes, rotated
from benchmarks.report import Bar, Plot, Report, Series, Table
from benchmarks.turns import Contender, Failed, Turns
from ddl import distribution

BATCH, RATE, CLASSES, COLUMNS, SIDE, BUFFER = 256, 0.01, 10, 16, 32, 10_000
STEPS_AT_ONCE = 50

TABLE, IMAGES = "table, 1,000,000 rows", "folder, 100,000 images"
DDL, TF_DATA, KERAS = "ddl", "tf.data", "Keras's image_dataset_from_directory"
FUNCTIONS = {
    TABLE: {DDL: "ddl_table", TF_DATA: "slices"},
    IMAGES: {DDL: "ddl_images", TF_DATA: "listed", KERAS: "from_directory"},
}
EXAMPLES = {TABLE: 1_000_000, IMAGES: 100_000}


@dataclasses.dataclass(frozen=True)
class Case:
    """Where the data are, and how many updates follow the first one.

    Attributes:
      path: The table, or the folder of images.
      steps: A multiple of `STEPS_AT_ONCE`.
    """

    path: str
    steps: int


# ------------------------------------------------------------ the data


def write_table(file: Path, rows: int) -> None:
    """Writes a Parquet file of the columns x0, x1, … and label."""
    import pyarrow
    from pyarrow import parquet

    generator = np.random.default_rng(0)
    columns = {f"x{i}": generator.random(rows, np.float32) for i in range(COLUMNS)}
    parquet.write_table(
        pyarrow.table({**columns, "label": generator.integers(0, CLASSES, rows)}), file
    )


def write_images(folder: Path, count: int) -> None:
    """Writes JPEG files; each image is one of 1,000."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (1_000, 8, 8, 3), np.uint8)
    images = np.repeat(np.repeat(coarse, SIDE // 8, axis=1), SIDE // 8, axis=2)
    encoded = [tf.io.encode_jpeg(image).numpy() for image in images]
    for label in range(CLASSES):
        (folder / f"class{label}").mkdir(parents=True)
    for number in range(count):
        name = folder / f"class{number % CLASSES}" / f"{number:06}.jpg"
        name.write_bytes(encoded[number % len(encoded)])


# ------------------------------------------------------------ the contenders


def table_model() -> keras.Model:
    """Builds the classifier of rows."""
    return keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(CLASSES)])


def image_model() -> keras.Model:
    """Builds the classifier of images."""
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((SIDE, SIDE, 3)), *layers])


def _measured(turns: Turns, case: Case, begin: Callable[[], Callable[[int], object]]) -> None:
    """Reports the figures of a contender.

    Args:
      turns: Gives the turn.
      case: The case.
      begin: Makes everything and the first update, and returns a function that makes a given
        number of updates, a multiple of `STEPS_AT_ONCE`.
    """
    turns.wait()
    start = time.perf_counter()
    train = begin()
    first = time.perf_counter() - start
    train(STEPS_AT_ONCE)  # traces a longer loop, and fills buffers
    start = time.perf_counter()
    train(case.steps)
    speed = case.steps * BATCH / (time.perf_counter() - start)
    turns.report({"first": first, "speed": speed, "memory": megabytes(os.getpid())["peak"]})


def _ddl(build: Callable[[], keras.Model], source: Any, **names: Any) -> Callable[[int], object]:
    strategy = distribution.build_strategy("one_device")
    with strategy.scope():
        task = ddl.Classification(build(), **names)
        optimizer = ddl.optimizers.FusedSGD(RATE)
        trainer = ddl.Trainer(task, optimizer, source, global_batch_size=BATCH, strategy=strategy)
    trainer.train(1)
    return trainer.train


def ddl_table(case: Case, turns: Turns) -> None:
    """Runs ddl on the table."""
    features = {"x": [f"x{i}" for i in range(COLUMNS)], "label": "label"}

    def begin() -> Callable[[int], object]:
        source = ddl.data.table(case.path, features=features)
        return _ddl(table_model, source, input_name="x")

    _measured(turns, case, begin)


def ddl_images(case: Case, turns: Turns) -> None:
    """Runs ddl on the images."""

    def begin() -> Callable[[int], object]:
        return _ddl(image_model, ddl.data.ImageFolder(case.path, (SIDE, SIDE, 3)))

    _measured(turns, case, begin)


def _fit(model: keras.Model, batches: tf.data.Dataset) -> Callable[[int], object]:
    iterator = iter(batches)
    model.compile(
        keras.optimizers.SGD(RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=STEPS_AT_ONCE,
        jit_compile=False,
    )
    model.make_train_function()
    step, whole = model.train_step, model.train_function

    @tf.function(autograph=False)
    def first() -> Any:
        return step(next(iterator))

    first()
    return lambda steps: [float(whole(iterator)["loss"]) for _ in range(steps // STEPS_AT_ONCE)]


def slices(case: Case, turns: Turns) -> None:
    """Trains by Keras on slices of the table."""

    def begin() -> Callable[[int], object]:
        from pyarrow import parquet

        table = parquet.read_table(case.path)
        x = np.stack([table.column(f"x{i}").to_numpy() for i in range(COLUMNS)], axis=1)
        rows = tf.data.Dataset.from_tensor_slices((x, table.column("label").to_numpy()))
        batches = rows.shuffle(BUFFER).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)
        return _fit(table_model(), batches)

    _measured(turns, case, begin)


def listed(case: Case, turns: Turns) -> None:
    """Trains by Keras on images that a map reads."""

    def decode(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
        return tf.ensure_shape(image, (SIDE, SIDE, 3)), label

    def begin() -> Callable[[int], object]:
        classes = sorted(os.listdir(case.path))
        found = [
            (os.path.join(case.path, name, file), label)
            for label, name in enumerate(classes)
            for file in os.listdir(os.path.join(case.path, name))
        ]
        files, labels = map(list, zip(*found, strict=True))
        listing = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files)).repeat()
        read = listing.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        return _fit(image_model(), read.batch(BATCH).prefetch(tf.data.AUTOTUNE))

    _measured(turns, case, begin)


def from_directory(case: Case, turns: Turns) -> None:
    """Trains by Keras on Keras's data set."""

    def begin() -> Callable[[int], object]:
        batches = keras.utils.image_dataset_from_directory(
            case.path, image_size=(SIDE, SIDE), batch_size=BATCH, verbose=False
        )
        return _fit(image_model(), batches.repeat())

    _measured(turns, case, begin)


# ------------------------------------------------------------ the report


def run_case(name: str, case: Case, processes: int) -> dict[str, dict[str, np.ndarray]]:
    """Returns the figures of each contender, [processes] each."""
    found: dict[str, list[Mapping[str, float]]] = {each: [] for each in FUNCTIONS[name]}
    for number in range(processes):
        for contender, function in rotated(FUNCTIONS[name], number).items():
            process = Contender(f"benchmarks.large_data:{function}", [case], {})
            try:
                found[contender].append(process.window())
            except Failed as failure:
                raise RuntimeError(f"{contender} with the {name}: {failure}") from failure
            finally:
                process.close()
    return {
        each: {figure: np.array([one[figure] for one in ones]) for figure in ones[0]}
        for each, ones in found.items()
    }


def reported(found: Mapping[str, dict[str, dict[str, np.ndarray]]], checks: bool) -> Report:
    """Returns the report of the data that were measured."""
    tables, bars, plots = [], [], []
    for name, contenders in found.items():
        speed = contenders[DDL]["speed"]
        ratios = {
            each: over_processes(speed / figures["speed"], is_ratio=True)
            for each, figures in contenders.items()
        }
        rows = [
            [
                each,
                "–" if each == DDL else ratios[each],
                *(over_processes(figures[key]) for key in ("speed", "first", "memory")),
            ]
            for each, figures in contenders.items()
        ]
        columns = ["", "ddl's speed / its", "examples/s", "s to the first step", "memory, MB"]
        tables.append(Table(name, columns, rows))
        if checks:
            bars.append(Bar(f"{name}: ddl's examples/s / tf.data's", ratios[TF_DATA], 1.0))
        rivals = [each for each in contenders if each != DDL]
        series = Series("", rivals, [ratios[each] for each in rivals])
        plots.append(Plot(name, "", "ddl's speed / that of", [series], level=1))
    return Report(tables, bars, plots)


def measure(quick: bool) -> Iterator[Report]:
    """Measures the table, then the images."""
    share = 100 if quick else 1
    found = {}
    with tempfile.TemporaryDirectory(prefix="large-data") as folder:
        for name, write in ((TABLE, write_table), (IMAGES, write_images)):
            path = Path(folder) / ("table.parquet" if name == TABLE else "images")
            write(path, EXAMPLES[name] // share)
            steps = STEPS_AT_ONCE if quick else (2_000 if name == TABLE else 300)
            found[name] = run_case(name, Case(str(path), steps), 1 if quick else 3)
            yield reported(found, checks=not quick)


if __name__ == "__main__":
    command.main(measure)
