"""Examples of a config's data, and the speed of reading them."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ddl.checkpoints.durable_files import write_atomically
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.data.pipeline.datasets import finished
from ddl.data.viewing import as_png, as_text, counts_of, described, is_picture, rows_as_text
from ddl.errors import ConfigError
from ddl.run.data.of_config import pipelines_of_config

_IN_TERMINAL = 4
"""Images that are shown as characters."""


def inspect(
    part: str, *, batch: int, rows: int, folder: Path | None, timed_batches: int
) -> Iterator[str]:
    """Yields lines on the data of the loaded config.

    Args:
      part: "train" or "eval".
      batch: Number of the batch to show, counted from 0 over the whole run.
      rows: Number of its examples to show.
      folder: Folder for pictures; None shows some as characters.
      timed_batches: Number of batches for the speed; 0 leaves it out.

    Raises:
      ConfigError: If the config has no such data, or the folder cannot be written.
      DataError: If the data cannot be read.
    """
    for name, pipeline in pipelines_of_config(part).items():
        source, size = pipeline.source, pipeline.global_batch_size
        title = f"{part} data {name}".strip()
        yield (
            f"{title}: {type(source).__name__}, {pipeline.num_examples:,} examples, "
            f"{pipeline.steps_per_epoch:,} batches of {size:,} per epoch"
        )
        shown = _batch(pipeline, batch)
        padding = 0 if "weight" in source.element_spec else int(np.sum(shown["weight"] == 0))
        yield f"\nbatch {batch:,}" + (f", {padding} rows of padding" if padding else "")
        shown = {name: values for name, values in shown.items() if name in source.element_spec}
        yield from described(shown)
        if counts := counts_of(shown):
            yield "\ncounts in the batch"
            yield from counts
        pictures = [feature for feature, values in shown.items() if is_picture(values)]
        texts = {key: values for key, values in shown.items() if key not in pictures}
        for row in range(min(rows, size)):
            yield f"\nexample {row}"
            yield from rows_as_text(texts, row)
            if folder is None and row < _IN_TERMINAL:
                for feature in pictures:
                    yield from as_text(shown[feature][row])
        if folder is not None and rows:
            for feature in pictures:
                file = folder / "-".join(filter(None, [part, name, feature, f"{batch}.png"]))
                _write(file, as_png(shown[feature][:rows]))
                yield f"\nWrote {file}."
        if timed_batches:
            yield "\n" + _speed(pipeline, batch, timed_batches)


def _batch(pipeline: BatchPipeline, number: int) -> dict[str, np.ndarray]:
    batches = _host_batches(pipeline, number)
    with data_errors(pipeline.source):
        found = next(iter(batches))
    return {name: np.asarray(values) for name, values in found.items()}


def _host_batches(pipeline: BatchPipeline, first: int):  # type: ignore[no-untyped-def]
    dataset = pipeline.source.batches(
        pipeline.global_batch_size, first, seed=pipeline.order_seed, shuffle=pipeline.shuffle
    )
    return finished(dataset).as_numpy_iterator()


def _speed(pipeline: BatchPipeline, first: int, count: int) -> str:
    batches = _host_batches(pipeline, first)
    with data_errors(pipeline.source):
        next(batches)  # starts the threads and fills the buffers
        begin, processor = time.perf_counter(), time.process_time()
        size = sum(sum(values.nbytes for values in next(batches).values()) for _ in range(count))
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    examples = count * pipeline.global_batch_size
    return (
        f"{count} batches: {examples / seconds:,.0f} examples/s, {size / seconds / 1e6:,.1f} MB/s, "
        f"{1e3 * seconds / count:.3g} ms and {1e3 * processor / count:.3g} ms of processor time "
        "each"
    )


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}. Pass another --output.") from error
