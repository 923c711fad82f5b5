"""Where figures go: metrics.jsonl, TensorBoard, the console. One interface for all."""

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from ddl.durable_files import sync, write_whole
from ddl.errors import ModelDirectoryError


class Writer(Protocol):
    """Takes the figures of one split at one step."""

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes `values` by name; `epoch` counts passes over the training data."""
        ...

    def drop_after(self, last_step: int) -> None:
        """Forgets the figures of later steps than `last_step`: those steps are made again."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class JsonLinesWriter:
    """Appends one JSON object a line. A figure that is not finite becomes null.

    Lines that cannot be written, since a disk is full, wait and are tried again with the next.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = logging.warning):
        """Goes on at the end of the file, if there is one.

        Args:
          path: The file.
          report: Called with what a person should know, once for each time that writing fails.
        """
        self._path = path
        self._report = report
        self._waiting: list[str] = []
        self._lock = threading.Lock()  # a checkpoint is written by another thread

    def has(self, step: int, split: str, names: Iterable[str]) -> bool:
        """Whether the file has a line of this step and split with figures of these names."""
        return any(
            values["step"] == step and values.get("split") == split and values.keys() >= set(names)
            for _, values in self._lines()
        )

    def drop_after(self, last_step: int) -> None:
        """Drops lines of later steps than `last_step`, and what was cut off in a line."""
        with self._lock:
            self._waiting = [x for x in self._waiting if json.loads(x)["step"] <= last_step]
            kept = "".join(line for line, x in self._lines() if x["step"] <= last_step)
            if self._path.exists() and kept != self._path.read_text():
                try:
                    write_whole(self._path, kept)
                except OSError as error:
                    raise self._error(error) from error

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, "epoch": round(epoch, 6), "split": split, **finite})
        with self._lock:
            first_to_wait = not self._waiting
            self._waiting.append(line + "\n")
            try:
                self._write_waiting()
            except OSError as error:
                if first_to_wait:
                    self._report(f"{self._error(error)}. The lines wait, and are tried again.")

    def sync(self) -> None:
        """Waits until all lines are on the disk.

        Raises:
          ModelDirectoryError: If some cannot be written.
        """
        try:
            with self._lock:
                self._write_waiting()
                if self._path.exists():
                    sync(self._path)
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Nothing is kept back that could be written; see `sync`."""

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each whole line and what it says."""
        if not self._path.exists():
            return
        for number, line in enumerate(self._path.read_text().splitlines(keepends=True), start=1):
            if not line.endswith("\n"):
                continue
            try:
                values = json.loads(line)
                values["step"] + 0
            except (ValueError, KeyError, TypeError) as error:
                raise ModelDirectoryError(
                    f"{self._path}:{number} is not a line that ddl wrote. Correct or remove it."
                ) from error
            yield line, values

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        with self._path.open("ab", buffering=0) as file:
            start = file.tell()
            text = "".join(self._waiting).encode()
            try:
                if file.write(text) != len(text):
                    raise OSError(0, "the disk took a part of a line only")
            except OSError:
                file.truncate(start)
                raise
        self._waiting = []

    def _error(self, error: OSError) -> ModelDirectoryError:
        return ModelDirectoryError(f"{self._path} cannot be written: {error.strerror}")


class TensorBoardWriter:
    """Event files, one folder a split. A full disk leaves gaps in them, and is reported."""

    def __init__(self, directory: Path, report: Callable[[str], None] = logging.warning):
        """Writes to `directory`/train and `directory`/eval, each made when first needed."""
        self._directory = directory
        self._report = report
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._fails = False

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        try:
            if split not in self._writers:
                self._writers[split] = tf.summary.create_file_writer(str(self._directory / split))
            with self._writers[split].as_default(step):
                for name, value in {"epoch": epoch, **values}.items():
                    tf.summary.scalar(name, value)
            self._writers[split].flush()
            self._fails = False
        except tf.errors.OpError as error:
            if not self._fails:
                self._report(f"event files in {self._directory / split} have gaps: {error.message}")
            self._fails = True

    def drop_after(self, last_step: int) -> None:
        """Drops events of later steps from the files, and what was cut off in one."""
        self.close()
        for split in ("train", "eval"):
            for path in (self._directory / split).glob("events.out.tfevents.*"):
                try:
                    _drop_events_after(path, last_step)
                except (tf.errors.OpError, OSError) as error:
                    self._report(f"{path} has events of later steps than {last_step}: {error}")

    def close(self) -> None:
        """Closes the event files."""
        for split, writer in self._writers.items():
            try:
                writer.close()
            except tf.errors.OpError as error:
                self._report(f"event files in {self._directory / split} end early: {error.message}")
        self._writers = {}


def _drop_events_after(path: Path, last_step: int) -> None:
    kept, whole = [], True
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            if tf.compat.v1.Event.FromString(record).step <= last_step:
                kept.append(record)
            else:
                whole = False
    except tf.errors.DataLossError:
        whole = False
    if not whole:
        partial = path.with_name("partial")  # TensorBoard reads what is named as events
        try:
            with tf.io.TFRecordWriter(str(partial)) as writer:
                for record in kept:
                    writer.write(record)
            sync(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Sequence[Writer]):
        """Keeps them in order."""
        self._writers = list(writers)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes to each."""
        for writer in self._writers:
            writer.write(step, epoch, split, values)

    def drop_after(self, last_step: int) -> None:
        """Has each forget later steps."""
        for writer in self._writers:
            writer.drop_after(last_step)

    def close(self) -> None:
        """Closes each, also if one fails."""
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
