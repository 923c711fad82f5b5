"""Predictions in a file: numbered parts, from which a killed command resumes, then one file."""

import dataclasses
import io
import json
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ddl.checkpoints.contents import digest_of, values_of
from ddl.checkpoints.directory import file_errors, sync, write_atomically
from ddl.choices import PREDICTIONS, check_types
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError, ModelDirectoryError, TrainingInterrupted, either
from ddl.run.directory import lock_folder
from ddl.run.writers import is_interactive
from ddl.signals import StopSignals
from ddl.tasks.parts import copies_of
from ddl.tasks.task import check_has_outputs
from ddl.training.evaluation import in_order
from ddl.training.trainer import Trainer

_PART_SECONDS, _PART_BYTES = 10.0, 16 << 20

Columns = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Settings of `--mode=predict`: data and columns.

    Attributes:
      data: The examples; None takes the evaluation data. They need no labels. A source without
        parentheses, as `@images`, is built only by `--mode=predict`.
      features: Names of features to write beside the outputs, such as a label or a number that
        names the example. The feature "weight" is always written, if the data have it.
    """

    data: Any = None
    features: Sequence[str] = ()


def predict(
    trainer: Trainer,
    path: str | os.PathLike[str],
    data: Any = None,
    features: Sequence[str] = (),
    *,
    report: Callable[[str], None] = logging.info,
    settings: str = "",
) -> Path:
    """Writes what the task's `predict` returns for each example, in order, to a file.

    The rows are kept in parts until all are there. The same call resumes after a stop or a kill.
    Eager, cross-replica context, on all workers, of which the chief writes.

    Args:
      trainer: Predicts, with the averages of the weights if it keeps any.
      path: The file to write; .jsonl or .npz selects its format.
      data: As of `ddl.Trainer.predict`; None takes the trainer's evaluation data.
      features: Names of features of the data to write beside the outputs.
      report: Called with lines of progress.
      settings: Further text, such as the config, that a resumed call must share.

    Returns:
      The path.

    Raises:
      ConfigError: If the task has no outputs, there are no data, or the format cannot hold them.
      DataError: If the data have no end or no rows, lack a feature or do not fit the task.
      ModelDirectoryError: If the file is there already or cannot be written, or a stopped call
        computed other rows.
      TrainingInterrupted: If a signal stopped it; the same call resumes it.
    """
    check_types(predict, locals(), ("return",))
    source = check_predicts(trainer, path, data)
    names = [*dict.fromkeys([*features, *({"weight"} & source.element_spec.keys())])]
    batch = next(iter(trainer.pipelines.values())).global_batch_size
    pipeline = BatchPipeline(source, batch)
    total = pipeline.count_examples()
    if not total:
        raise DataError("A prediction needs at least one row, but the data have none.")
    workers, parts, end = Workers(trainer.strategy), _Parts(Path(path)), 0
    with trainer.evaluation_weights(), closing(parts):
        with workers.failing_together():
            if workers.is_chief:
                some = pipeline.first_examples(min(batch, total)).values()
                digest = zlib.crc32(b"".join(tf.io.serialize_tensor(x).numpy() for x in some))
                given = f"{total:,} rows in batches of {batch:,}, {names}, digest {digest:08x}"
                end = parts.open({"weights": _weights(trainer), "data": given, "config": settings})
        if end := workers.broadcast(end):
            report(f"Resuming after {end:,} of {total:,} rows.")
        waiting: list[Columns] = []
        since = time.monotonic()
        batches = trainer.predict_batches(source, features=names, first_batch=end // batch)
        with StopSignals(lambda: None, may_end=not is_interactive()) as stop, closing(batches):
            while end < total and not workers.any(stop.received is not None):
                made = next(batches)
                end = min(end + batch, total)
                with workers.failing_together():
                    if workers.is_chief:
                        waiting.append(_columns(*made, end))
                    size = sum(values.nbytes for one in waiting for values in one.values())
                    if size >= _PART_BYTES or time.monotonic() > since + _PART_SECONDS:
                        parts.add(end, waiting)
                        report(f"Predicted {end:,} of {total:,} rows.")
                        waiting, since = [], time.monotonic()
        with workers.failing_together():
            parts.add(end, waiting)
            if end == total and workers.is_chief:
                report(f"Wrote {total:,} rows to {path}: {', '.join(parts.complete())}.")
    if end < total:
        name = "a signal to another worker" if stop.received is None else stop.received.name
        what = f"Prediction stopped on {name} after {end:,} of {total:,} rows"
        raise TrainingInterrupted(f"{what}. Run the same command to resume.")
    return Path(path)


def check_predicts(trainer: Trainer, path: str | os.PathLike[str], data: Any) -> Source | Stream:
    """Checks task, file and data of a prediction before weights are restored.

    Changes nothing on disk. Returns the data.

    Raises:
      ConfigError: As `predict`.
      DataError: As `predict`.
      ModelDirectoryError: If the file is there already.
    """
    if os.path.splitext(path)[1] not in PREDICTIONS:
        raise ConfigError(f"The file must end with {either(PREDICTIONS)}, got {path}.")
    if os.path.exists(path):
        raise ModelDirectoryError(f"{path} is there already. Pass another name.")
    check_has_outputs(trainer.task, "a prediction")
    if data is None and trainer.eval_pipeline is not None:
        data = trainer.eval_pipeline.source
    if data is None:
        raise ConfigError("There are no data. Bind Predictions.data, or pass data in Python.")
    source = in_order(trainer.task, data, "The data", trainer.pipelines).source
    if isinstance(source, Stream) and source.is_endless:
        raise DataError("A prediction needs data with an end, got endless data. Pass others.")
    return source


def _weights(trainer: Trainer) -> str:
    """Identifies the weights and other variables of the task, as the model holds them now."""
    values = {x.key: x for x in values_of(trainer) if x.key.startswith(("model/", "task/"))}
    digest = digest_of(
        {key: value.entry for key, value in values.items()},
        lambda key: copies_of(values[key].variable)[0].numpy(),
    )
    return f"step {trainer.step:,}, digest {digest[:16]}"


class _Parts:
    """The rows of a file that is not complete, in the folder FILE.partial. Only on the chief.

    Each part holds whole batches and is written atomically, so that a process killed anywhere
    leaves whole parts. The file gets its name when all of its rows are there.
    """

    def __init__(self, path: Path):
        self.path = path
        self.folder = path.with_name(path.name + ".partial")
        self._name = str(path)
        self._lock: int | None = None

    def open(self, identity: Mapping[str, str]) -> int:
        """Creates and locks the folder, or opens that of a call that was stopped.

        Returns:
          The number of rows that are there.
        """
        file = self.folder / "identity.json"
        with file_errors(self._name):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder, self._name)
            if not file.exists():
                write_atomically(file, json.dumps(identity, indent=1))
            saved = json.loads(file.read_bytes())
            parts = sorted(self.folder.glob("rows-*.npz"))
        if changed := [name for name in identity if saved.get(name) != identity[name]]:
            raise ModelDirectoryError(
                f"{self.folder} holds rows of a stopped command whose {' and '.join(changed)} "
                "differ. Repeat that command, remove the folder, or pass another file."
            )
        return int(parts[-1].stem.partition("-")[2]) if parts else 0

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            os.close(self._lock)

    def add(self, end: int, batches: Sequence[Columns]) -> None:
        """Writes rows as a part, whole or not at all; its name says the last row."""
        if not batches:
            return
        content = io.BytesIO()
        _write_npz(content, ((x, np.concatenate([one[x] for one in batches])) for x in batches[0]))
        with file_errors(self._name):
            write_atomically(self.folder / f"rows-{end:015d}.npz", content.getvalue())

    def read(self, name: str | None = None) -> Iterator[Columns]:
        """Yields the parts in order, with one of their columns or with all."""
        end = 0
        for path in sorted(self.folder.glob("rows-*.npz")):
            try:
                with np.load(path) as part:
                    found = {one: part[one] for one in ([name] if name else part.files)}
                end += len(next(iter(found.values())))
                if path.stem != f"rows-{end:015d}":
                    raise ValueError(f"it ends with row {end:,}")
                yield found
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                what = f"{path} is damaged: {error}. Remove {self.folder}"
                raise ModelDirectoryError(f"{what} and run the same command again.") from error

    def complete(self) -> list[str]:
        """Writes the file from its parts, removes these, and returns the names of the columns."""
        names, whole = [*next(self.read())], self.folder / "whole"
        with file_errors(self._name):
            if self.path.suffix == ".npz":  # the memory holds one column
                each = ((x, np.concatenate([part[x] for part in self.read(x)])) for x in names)
                _write_npz(whole, each)
            else:
                with whole.open("w", encoding="utf-8") as file:
                    for part in self.read():
                        rows = zip(*(_json_rows(x, part[x]) for x in names), strict=True)
                        file.writelines(f"{{{', '.join(row)}}}\n" for row in rows)
            sync(whole)
            os.replace(whole, self.path)
            sync(self.path.parent)
            shutil.rmtree(self.folder, ignore_errors=True)
        return names


def _write_npz(file: Path | io.BytesIO, columns: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes columns one after the other; np.savez takes all, and none called "file"."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, column in columns:
            # A fixed date, so that equal predictions are equal files.
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, column, allow_pickle=False)


def _columns(outputs: Any, features: Mapping[str, np.ndarray], end: int) -> Columns:
    """Returns the columns of a batch up to a row: its features, then its outputs by name."""
    columns: Columns = {}
    for name, values in [*features.items(), *_named(outputs, "")]:
        if name in columns:
            raise ConfigError(
                f"Two columns of the predictions are called {name!r}. Return the output under "
                "another name from predict, or leave the feature out of Predictions.features."
            )
        columns[name] = _storable(name, values, end)
    if not columns:
        raise ConfigError("predict returned no output. Return at least one tensor.")
    return columns


def _named(outputs: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of nested outputs; names within others are joined by "/"."""
    if isinstance(outputs, Mapping):
        pairs = [(str(key), value) for key, value in outputs.items()]
    elif isinstance(outputs, tuple | list):
        numbered = [f"{'' if name else 'output_'}{number}" for number in range(len(outputs))]
        pairs = [*zip(getattr(outputs, "_fields", numbered), outputs, strict=True)]
    else:
        yield name or "output", outputs
        return
    for key, value in pairs:
        yield from _named(value, f"{name}/{key}" if name else key)


def _storable(name: str, values: np.ndarray, end: int) -> np.ndarray:
    """Returns values that every format can hold without loss; texts as numpy's unicode."""
    kind = values.dtype.kind
    # Dtypes that numpy lacks, such as float8_e5m2, may have the kind of those that it has.
    if kind in "biuf" and values.dtype.isbuiltin == 1:
        return values
    if kind == "c":
        raise ConfigError(f"The output {name!r} is complex. Return its two parts from predict.")
    if kind != "O":
        return values.astype(np.float32)  # of bfloat16 and the float8 dtypes
    try:
        texts = [one.decode() if isinstance(one, bytes) else str(one) for one in values.flat]
    except UnicodeDecodeError:
        texts = ["\0"]
    if any(text.endswith("\0") for text in texts):
        raise DataError(
            f"{name!r} must be UTF-8 text that does not end with a NUL character, before row "
            f"{end:,}. Leave it out of the predictions, or return numbers."
        )
    return np.array(texts, np.str_).reshape(values.shape)


def _json_rows(name: str, values: np.ndarray) -> Iterator[str]:
    """Yields `"name": value` of each row; JSON has no NaN and no infinity: null, and 1e999."""
    key = json.dumps(name, ensure_ascii=False)
    finite = values.dtype.kind != "f" or np.isfinite(values).all()
    for row in values.tolist():
        text = json.dumps(row, ensure_ascii=False)
        if not finite:
            text = text.replace("NaN", "null").replace("Infinity", "1e999")
        # Many readers take these two characters for ends of lines.
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        yield f"{key}: {text}"
