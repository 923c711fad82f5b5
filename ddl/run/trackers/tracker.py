"""The interface of a tracker, and the writer that sends the figures of a run to one."""

import importlib.util
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ConfigError, TrainingInterrupted, installing
from ddl.run.directory import RunDirectory
from ddl.user_code import message_of

Status = Literal["done", "stopped", "failed"]

FOLDER = "trackers"
"""Folder of a run with a folder for each tracker, which holds the id of the tracker's run."""

# Seconds that the end of a run waits for a tracker. A preempted machine gives about 30.
_PATIENCE = 20.0


class Session(Protocol):
    """An open run of a tracker.

    Attributes:
      id: The tracker's name of the run, by which a resumed run finds it again.
    """

    id: str

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends figures.

        Args:
          step: Updates made.
          figures: Values by name, such as "train/loss".
        """

    def end(self, status: Status) -> None:
        """Sends what is pending, and ends the tracker's run."""


class Tracker(Protocol):
    """A service that keeps the figures of runs.

    Attributes:
      name: Name of its folder in the run's directory.
    """

    name: str

    def begin(
        self, folder: Path | None, settings: Mapping[str, Any], run_id: str | None
    ) -> Session:
        """Begins a run, or continues one. Called in a thread of its own, on the chief.

        Args:
          folder: A folder for files of the tracker; None if the run writes no files.
          settings: The macros of the config, by name.
          run_id: Id of the tracker's run to continue; None begins a new one.
        """


class TrackerWriter:
    """Sends figures to a tracker; a writer (`ddl.run.writers.Writer`).

    A thread calls the tracker, so that a slow service delays no update: workers would take a chief
    that waits for one as lost. If the tracker fails, this is reported once, and nothing more is
    sent. The tracker keeps the figures of steps that a run repeats.
    """

    def __init__(
        self, tracker: Tracker, directory: RunDirectory | None, report: Callable[[str], None]
    ):
        """Keeps the arguments; connects to nothing yet.

        Args:
          tracker: The tracker.
          directory: The directory of the run, if any.
          report: Called with a message when the tracker fails.
        """
        self._tracker = tracker
        self._directory = directory
        self._report = report
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float]] | Status] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_reported = False

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="tracker", daemon=True)
            self._thread.start()
        figures = {f"{split}/{name}": value for name, value in values.items()}
        self._waiting.put((step, {"epoch": epoch, **figures}))

    def drop_after(self, last_step: int) -> None:
        """Does nothing: a tracker drops no figures."""

    def close(self) -> None:
        """Ends the tracker's run, and waits for it, but not long."""
        if self._thread is None:
            return
        error = sys.exc_info()[0]  # a run closes its writers while its error is handled
        stopped = error is not None and issubclass(error, (TrainingInterrupted, KeyboardInterrupt))
        self._waiting.put("done" if error is None else "stopped" if stopped else "failed")
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._report_once(
                f"The tracker {self._tracker.name} has not taken all figures within "
                f"{_PATIENCE:g} s; the run ends without it. metrics.jsonl has all figures."
            )
        self._thread = None

    def _send(self) -> None:
        """Sends what `write` queues, until a status or an error."""
        try:
            session = self._begun()
            while not isinstance(entry := self._waiting.get(), str):
                session.log(*entry)
            session.end(entry)
        except Exception as error:  # a service and its client may raise anything
            reason = f"{message_of(error):.500}".rstrip(".")
            self._report_once(
                f"The tracker {self._tracker.name} failed and gets no more figures of this run: "
                f"{reason}. Training continues, and metrics.jsonl has all figures. A resumed run "
                "tries again."
            )

    def _report_once(self, text: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report(text)

    def _begun(self) -> Session:
        """Begins the tracker's run, or continues that of an earlier call."""
        if self._directory is None:
            return self._tracker.begin(None, {}, None)
        folder = self._directory.path / FOLDER / self._tracker.name
        folder.mkdir(parents=True, exist_ok=True)
        run_id = None
        with suppress(FileNotFoundError):
            run_id = (folder / "run_id").read_text(encoding="utf-8").strip() or None
        session = self._tracker.begin(folder, self._directory.macros(), run_id)
        if session.id != run_id:
            write_atomically(folder / "run_id", session.id + "\n")
        return session


def checked_trackers(trackers: Any, where: str) -> tuple[Tracker, ...]:
    """Returns trackers as a tuple.

    Args:
      trackers: A sequence of trackers.
      where: Name of the argument for the error.

    Raises:
      ConfigError: If it holds something else, or two trackers of one name.
    """
    given = trackers if isinstance(trackers, Sequence) and not isinstance(trackers, str) else None
    if given is None or not all(callable(getattr(one, "begin", None)) for one in given):
        raise ConfigError(
            f"{where} must be a list of trackers, got {trackers!r:.80}. Write [@MLflow()] in a "
            "config, or [MLflow()] in Python."
        )
    names = [one.name for one in given]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{where} must hold one tracker of each kind, got {', '.join(names)}. Leave one out."
        )
    return tuple(given)


def check_installed(module: str, extra: str, name: str) -> None:
    """Raises ConfigError if the package of a tracker is not installed.

    Args:
      module: The module that it imports.
      extra: The extra of ddl that installs it.
      name: Name of the tracker.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{name} needs the package {module}, which is not installed. {installing(extra)} Or "
            "leave the tracker out."
        )
