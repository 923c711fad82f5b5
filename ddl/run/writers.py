"""Writers of metrics: lines of JSON, and the interface that all writers share."""

import errno
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from ddl.checkpoints.durable_files import sync, write_atomically
from ddl.errors import ModelDirectoryError
from ddl.figures import is_measured
from ddl.output import open_itself, unwritable
from ddl.run.event_files import TensorBoardWriter
from ddl.run.metric_lines import chunks, parsed, start_of_last_line

__all__ = ["JsonLinesWriter", "TensorBoardWriter", "WithoutMeasured", "Writer", "Writers"]

# Attempts to open a file that others replace, a millisecond apart.
_ATTEMPTS = 2000


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

    def drop_after(self, last_step: int) -> None:
        """Drops the metrics of steps after `last_step`, which the run repeats."""
        ...

    def close(self) -> None:
        """Writes pending metrics and releases files."""
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
          path: The file.
          report: Called with a message when writes begin to fail, and when a cut-off line is
            removed.
        """
        self._path = path
        self._report = report
        self._waiting: list[str] = []
        self._lock = threading.Lock()  # the checkpoint thread calls `sync`

    def check(self) -> None:
        """Raises ModelDirectoryError if the file is unreadable or has a line not written by ddl.

        A link is refused here too, since its lines would only wait for a file that can be written.
        """
        if self._path.is_symlink():
            raise self._error(
                OSError(errno.ELOOP, "it is a symbolic link; ddl needs the file itself")
            )
        for _ in chunks(self._path):
            pass

    def has(self, step: int, split: str, names: Iterable[str]) -> bool:
        """Returns whether the file has a line of this step and split with all these metrics.

        Raises:
          ModelDirectoryError: As `check` does.
        """
        return any(
            values["step"] == step and values.get("split") == split and values.keys() >= set(names)
            for chunk in chunks(self._path)
            if chunk.steps is None or step in chunk.steps
            for _, values in chunk.lines()
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the values of each line.

        Raises:
          ModelDirectoryError: As `check` does.
        """
        yield from (values for chunk in chunks(self._path) for _, values in chunk.lines())

    def drop_after(self, last_step: int) -> None:
        """Drops the lines of steps after `last_step`, and a cut-off last line.

        Raises:
          ModelDirectoryError: As `check` does, or if the file cannot be written; the file then
            keeps its whole lines.
        """
        with self._lock:
            self._waiting = [x for x in self._waiting if json.loads(x)["step"] <= last_step]
            if not self._path.exists():
                return
            try:
                with self._alone() as file:
                    self._end_last_line(file)
                    # Checks the whole file before it is replaced, and often it need not be.
                    if any([x.until(last_step) != x.content for x in chunks(self._path)]):
                        kept = (chunk.until(last_step) for chunk in chunks(self._path))
                        write_atomically(self._path, kept)
            except OSError as error:
                raise self._error(error) from error

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Appends metrics as a line; see `Writer`. Reports the first failed write."""
        kept = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "epoch": round(epoch, 6), "split": split, **kept}
        with self._lock:
            first_to_wait = not self._waiting
            self._waiting.append(json.dumps(line) + "\n")
            try:
                self._write_waiting()
            except OSError as error:
                if first_to_wait:
                    self._report(f"{self._error(error)} The next write tries these lines again.")

    def sync(self) -> None:
        """Writes waiting lines and flushes the file to disk.

        Raises:
          ModelDirectoryError: If a line cannot be written.
        """
        try:
            with self._lock:
                self._write_waiting()
                if self._path.exists():
                    sync(self._path)
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Does nothing: lines are written at once, and `sync` retries failed ones."""

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        with self._alone() as file:
            self._end_last_line(file)
            start = file.seek(0, os.SEEK_END)
            text = "".join(self._waiting).encode()
            try:
                if file.write(text) != len(text):
                    raise OSError(0, "only a part of a line was written")
            except OSError:
                file.truncate(start)
                raise
        self._waiting = []

    @contextmanager
    def _alone(self) -> Iterator[FileIO]:
        """Opens the file, created if missing, for appending under an exclusive lock."""
        for _ in range(_ATTEMPTS):
            with open(self._path, "a+b", buffering=0, opener=open_itself) as file:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                # During the wait for the lock, another process may have replaced the file. A line
                # in the old one would be lost.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    yield file
                    return
            time.sleep(0.001)
        raise OSError(0, "another process replaces it again and again")

    def _end_last_line(self, file: FileIO) -> None:
        """Adds a missing newline to the last line if its JSON is whole, else removes the line."""
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) in (b"", b"\n"):
            return
        start = start_of_last_line(file)
        file.seek(start)
        if parsed(file.read()) is not None:
            file.write(b"\n")
            return
        file.truncate(start)
        self._report(f"{self._path}: removed the incomplete last line of {size - start:,} bytes.")

    def _error(self, error: OSError) -> ModelDirectoryError:
        return ModelDirectoryError(unwritable(self._path, error))


class WithoutMeasured:
    """Passes a writer all figures but those of the machine."""

    def __init__(self, writer: Writer):
        """Keeps the writer."""
        self._writer = writer

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        kept = {name: value for name, value in values.items() if not is_measured(name)}
        self._writer.write(step, epoch, split, kept)

    def drop_after(self, last_step: int) -> None:
        """See `Writer`."""
        self._writer.drop_after(last_step)

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()


class Writers:
    """A list of writers, used as one."""

    def __init__(self, writers: Sequence[Writer]):
        """Keeps the writers in order."""
        self._writers = list(writers)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes the metrics with each writer; see `Writer`."""
        for writer in self._writers:
            writer.write(step, epoch, split, values)

    def drop_after(self, last_step: int) -> None:
        """Drops later steps from each writer; see `Writer`."""
        for writer in self._writers:
            writer.drop_after(last_step)

    def close(self) -> None:
        """Closes all writers, even if one of them raises."""
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
