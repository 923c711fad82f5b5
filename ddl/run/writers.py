"""Writers of the figures of a run: lines of JSON, TensorBoard's event files, the console."""

import fcntl
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

import tensorflow as tf
from absl import logging
from rich.console import Console
from rich.text import Text
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from ddl.checkpoints.directory import file_errors, write_atomically
from ddl.errors import ModelDirectoryError
from ddl.figures import EXAMPLES_PER_SECOND, is_measured
from ddl.metrics.history import format_figures
from ddl.output import printable
from ddl.run.directory import RunDirectory
from ddl.training.progress import Bar, open_bar, open_console

_SESSION = ".hparams"  # suffix of the event files of the HParams tab


class Writer(Protocol):
    """Interface for writing the metrics of one split at one step."""

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes metrics.

        Args:
          step: Updates made.
          epoch: Passes over the training data; 0 if their length is unknown.
          split: `train` or `eval`.
          values: Metrics by name.
        """
        ...


class JsonLinesWriter:
    """Appends one JSON object per line. A value that is not finite becomes null.

    A failed write, as on a full disk, is retried with the next line. Several processes may append
    to one file, such as a run and its evaluation. `drop_after` ends or removes the last line of a
    process that was killed while it wrote.
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

    def rows(self, content: bytes | None = None) -> Iterator[dict[str, Any]]:
        """Yields the values of each whole line.

        Args:
          content: The content of the file; None reads it.

        Raises:
          ModelDirectoryError: If the file cannot be read, or ddl did not write a line.
        """
        if content is None:
            with file_errors(str(self._path)):
                content = self._path.read_bytes() if self._path.exists() else b""
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            if not _is_whole(line):
                what = f"{self._path}:{number} must be a JSON object with a step, as ddl writes it"
                raise ModelDirectoryError(f"{what}. Correct or remove the line.")
            yield json.loads(line)

    def drop_after(self, last_step: float) -> None:
        """Drops the lines of steps after `last_step`, which the run repeats, and a cut-off line.

        Raises:
          ModelDirectoryError: As `rows`, or if the file cannot be written; the file then keeps its
            whole lines.
        """
        with self._locked():
            self._waiting = [x for x in self._waiting if json.loads(x)["step"] <= last_step]
            content = self._path.read_bytes()
            last = content.rpartition(b"\n")[2]
            whole = content + b"\n" if _is_whole(last) else content[: len(content) - len(last)]
            if last and not _is_whole(last):
                self._report(f"{self._path}: removed the incomplete last line, {len(last)} bytes.")
            kept = [row for row in self.rows(whole) if row["step"] <= last_step]
            if last or len(kept) < whole.count(b"\n"):
                write_atomically(self._path, "".join(f"{json.dumps(row)}\n" for row in kept))

    @contextmanager
    def _locked(self) -> Iterator[FileIO]:
        """Opens the file to append, which no other thread or process changes meanwhile."""
        with self._lock, file_errors(str(self._path)):
            while True:
                with self._path.open("ab", buffering=0) as file:
                    with suppress(OSError):  # some network file systems have no locks
                        fcntl.flock(file, fcntl.LOCK_EX)
                    # Another process may have replaced the file before this one had the lock.
                    if os.path.samefile(self._path, file.fileno()):
                        yield file
                        return

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
        if not self._waiting and not (to_disk and self._path.exists()):
            return
        with self._locked() as file:
            start, lines = os.fstat(file.fileno()).st_size, "".join(self._waiting).encode()
            try:
                if file.write(lines) != len(lines):
                    raise OSError("only a part of a line was written")
            except OSError:
                file.truncate(start)
                raise
            self._waiting = []
            if to_disk:
                os.fsync(file.fileno())


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
        scalars = {"epoch": epoch} if epoch else {}
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
                    f"The event files in {self._directory / split} get a gap: they cannot be "
                    f"written: {error.message.splitlines()[0]}. Check disk space and permissions."
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
        macros, folder = directory.macros(), self._directory / split
        for earlier in folder.glob(f"events.out.tfevents.*{_SESSION}"):
            with suppress(OSError):
                earlier.unlink()
        if not macros:
            return
        values = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in macros.items()
            if value is not None
        }
        with self._reporting(split):
            writer = tf.summary.create_file_writer(str(folder), filename_suffix=_SESSION)
            with writer.as_default(0):
                tf.summary.experimental.write_raw_pb(hparams_pb(values).SerializeToString(), 0)
                tf.summary.text("config", indent(directory.saved_config() or "", "    "))
            writer.close()

    def close(self) -> None:
        """Closes the event files."""
        for split, writer in self._writers.items():
            with self._reporting(split):
                writer.close()
        self._writers = {}


class RunConsole:
    """The console of a run: a line per log, and a progress bar on a terminal or in a notebook.

    Output that fails never ends a run (`ddl.output`), and a name is never read as markup or as a
    control sequence of the terminal.
    """

    def __init__(self, console: Console | None = None, shows: bool = True):
        """Opens the console.

        Args:
          console: Console to print on; None makes one on standard output.
          shows: Whether the console on standard output prints anything.
        """
        self._console = console or open_console(shows)
        self._bar: Bar | None = None

    def line(self, text: str) -> None:
        """Prints a text, above the progress bar if there is one.

        On a terminal it is wrapped between words; elsewhere each line stays whole.
        """
        self._console.print(Text(printable(text)), soft_wrap=not self._console.is_terminal)

    def start(self, step: int, total: int) -> None:
        """Shows the progress bar from `step` to `total`, on a terminal or in a notebook."""
        self._bar = open_bar(self._console, step, total)

    def advance(self, step: int, figures: Callable[[], Mapping[str, float]]) -> None:
        """Updates the progress bar, if there is one, with the figures that a function returns."""
        if self._bar is not None:
            self._bar.advance(step, figures())

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Prints metrics as a line; see `Writer`."""
        passes = f" · epoch {epoch:.2f}" if epoch else ""
        self.line(f"step {step:,}{passes} · {split} · {format_figures(values)}")

    def close(self) -> None:
        """Stops the progress bar and leaves it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def is_interactive() -> bool:
    """Returns whether a user types into this process: a notebook, IPython, or Python's prompt."""
    shell = sys.modules.get("IPython")
    has_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return has_prompt or (shell is not None and shell.get_ipython() is not None)
