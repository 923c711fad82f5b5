"""Writers of the figures of a run: lines of JSON, and TensorBoard's event files."""

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
from absl import logging
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from ddl.checkpoints.durable_files import sync, write_atomically
from ddl.errors import ModelDirectoryError
from ddl.figures import EXAMPLES_PER_SECOND, is_measured
from ddl.run.directory import RunDirectory, naming

# Attempts to open a file that others replace, a millisecond apart.
_ATTEMPTS = 2000
_SESSION = ".hparams"  # suffix of the event files of the HParams tab


class Writer(Protocol):
    """Interface for writing the metrics of one split at one step."""

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes metrics.

        Args:
          step: Updates made.
          epoch: Passes over the training data.
          split: `train` or `eval`.
          values: Metrics by name.
        """
        ...


class JsonLinesWriter:
    """Appends one JSON object per line. A value that is not finite becomes null.

    A failed write, as on a full disk, is retried with the next line. Several processes may write
    to one file, such as a run and its evaluation. If one of them was killed while writing a line,
    the next writer ends that line if its JSON is whole, and removes it otherwise.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = logging.warning):
        """Keeps the path. Lines are appended to an existing file.

        Args:
          path: The file; a link to one is followed.
          report: Called with a message when writes begin to fail, and when a cut-off line is
            removed.
        """
        self._path = Path(os.path.realpath(path))
        self._report = report
        self._waiting: list[str] = []
        self._lock = threading.Lock()  # the checkpoint thread calls `sync`

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the values of each whole line.

        Raises:
          ModelDirectoryError: If the file cannot be read, or ddl did not write a line.
        """
        if not self._path.exists():
            return
        with naming(str(self._path)), self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and line.endswith(b"\n"):
                    if not _is_whole(line):
                        raise ModelDirectoryError(
                            f"{self._path}:{number} must be a JSON object with a step, as ddl "
                            "writes it. Correct or remove the line."
                        )
                    yield json.loads(line)

    def drop_after(self, last_step: int) -> None:
        """Drops the lines of steps after `last_step`, which the run repeats, and a cut-off line.

        Raises:
          ModelDirectoryError: As `rows`, or if the file cannot be written; the file then keeps its
            whole lines.
        """
        with self._lock, naming(str(self._path)):
            self._waiting = [x for x in self._waiting if json.loads(x)["step"] <= last_step]
            if not self._path.exists():
                return
            with self._alone():
                if max((row["step"] for row in self.rows()), default=0) > last_step:
                    kept = (row for row in self.rows() if row["step"] <= last_step)
                    write_atomically(self._path, (f"{json.dumps(x)}\n".encode() for x in kept))

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Appends metrics as a line; see `Writer`. Reports the first failed write."""
        kept = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "epoch": round(epoch, 6), "split": split, **kept}
        with self._lock:
            self._waiting.append(json.dumps(line) + "\n")
        try:
            self.sync(to_disk=False)
        except ModelDirectoryError as error:
            if len(self._waiting) == 1:
                self._report(f"{error} The next write tries again.")

    def sync(self, to_disk: bool = True) -> None:
        """Writes waiting lines and flushes the file to disk.

        Raises:
          ModelDirectoryError: If a line cannot be written.
        """
        with self._lock, naming(str(self._path)):
            if self._waiting:
                with self._alone() as file:
                    start = file.seek(0, os.SEEK_END)
                    text = "".join(self._waiting).encode()
                    try:
                        if file.write(text) != len(text):
                            raise OSError("only a part of a line was written")
                    except OSError:
                        file.truncate(start)
                        raise
                self._waiting = []
            if to_disk and self._path.exists():
                sync(self._path)

    @contextmanager
    def _alone(self) -> Iterator[FileIO]:
        """Opens the file, created if missing, for appending under a lock; ends a cut-off line."""
        for _ in range(_ATTEMPTS):
            with open(self._path, "a+b", buffering=0) as file:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                # During the wait for the lock, another process may have replaced the file. A line
                # in the old one would be lost.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    self._end_last_line(file)
                    yield file
                    return
            time.sleep(0.001)
        raise OSError("another process replaces it again and again")

    def _end_last_line(self, file: FileIO) -> None:
        """Adds a missing newline to the last line if its JSON is whole, else removes the line."""
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) in (b"", b"\n"):
            return
        file.seek(0)
        last = file.readlines()[-1]  # killed writers are rare, so that this may read all
        if _is_whole(last):
            file.write(b"\n")
            return
        file.truncate(size - len(last))
        self._report(f"{self._path}: removed the incomplete last line of {len(last):,} bytes.")


def _is_whole(line: bytes) -> bool:
    """Returns whether a line is one that ddl writes."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return type(step) is int and step >= 0


class TensorBoardWriter:
    """Writes TensorBoard event files, one folder per split. Failed writes are reported and lost.

    TensorBoard itself drops the events of steps that a resumed run computed again.
    """

    def __init__(self, directory: Path, report: Callable[[str], None] = logging.warning):
        """Keeps the folder; creates no files yet.

        Args:
          directory: Parent of the folders `train` and `eval`, each created at its first write.
          report: Called with a message when writes begin to fail.
        """
        self._directory = directory
        self._report = report
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._fails = False

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`. The figures of the machine are on a page of their own, `time`."""
        scalars = {"epoch": epoch}
        for name, value in values.items():
            is_time = name == EXAMPLES_PER_SECOND or is_measured(name)
            scalars[f"time/{name}" if is_time else name] = value
        # Joined protos are one: tf.summary.scalar would take several times as long for each figure.
        record = b"".join(scalar_pb(*one).SerializeToString() for one in scalars.items())
        with self._reporting(split):
            with self.summaries(split, step):
                tf.summary.experimental.write_raw_pb(record, step)
            self._writers[split].flush()
            self._fails = False

    def summaries(self, split: str, step: int) -> AbstractContextManager[Any]:
        """Makes `tf.summary` write to the files of a split within the `with` block."""
        if split not in self._writers:
            self._writers[split] = tf.summary.create_file_writer(str(self._directory / split))
        return self._writers[split].as_default(step)

    @contextmanager
    def _reporting(self, split: str) -> Iterator[None]:
        """Reports the first of several failures of TensorFlow within the `with` block."""
        try:
            yield
        except tf.errors.OpError as error:
            if not self._fails:
                self._report(
                    f"The event files in {self._directory / split} cannot be written and get a gap:"
                    f" {error.message.splitlines()[0]}. Check the free disk space and the "
                    "permissions."
                )
            self._fails = True

    def session(self, split: str, directory: RunDirectory) -> None:
        """Writes macros as hyperparameters, for the HParams tab, and the config as text.

        Replaces the session of an earlier call, since TensorBoard shows the first one of a folder.
        A run without a config has none.

        Args:
          split: The split whose figures are the metrics of the session.
          directory: The directory of the run, whose config is written.
        """
        macros = directory.macros()
        folder = self._directory / split
        for earlier in folder.glob(f"events.out.tfevents.*{_SESSION}"):
            with suppress(OSError):
                earlier.unlink()
        values = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in macros.items()
            if value is not None
        }
        lines = (directory.saved_config() or "").splitlines()
        if not macros:
            return
        with self._reporting(split):
            writer = tf.summary.create_file_writer(str(folder), filename_suffix=_SESSION)
            with writer.as_default(0):
                tf.summary.experimental.write_raw_pb(hparams_pb(values).SerializeToString(), 0)
                tf.summary.text("config", "\n".join(f"    {line}" for line in lines))  # Markdown
            writer.close()

    def close(self) -> None:
        """Closes the event files."""
        for split, writer in self._writers.items():
            with self._reporting(split):
                writer.close()
        self._writers = {}
