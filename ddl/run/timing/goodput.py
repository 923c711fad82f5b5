"""The seconds of a run's whole life by kind of work, restarts included. No TensorFlow."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddl.checkpoints.durable_files import write_atomically
from ddl.diagnosis.times import KINDS
from ddl.files import open_itself, unwritable

NAME = "goodput.json"
"""File in the run's directory."""

NAMES = {
    "loop": "updates",
    "input": "waiting for input",
    "repeated": "repeated updates",
    "tracing": "tracing",
    "evaluation": "evaluation",
    "saving": "saving",
    "restoring": "restoring",
    "callbacks": "callbacks",
    "workers": "waiting for workers",
    "between": "Python between loops",
    "start_up": "start-up",
    "down": "down",
}
"""Kinds of work as they are shown."""

_LARGEST_FILE = 2**16
_SECONDS_BETWEEN_WRITES = 5.0


@dataclasses.dataclass
class Life:
    """The life of a run, as its file keeps it. Times are in seconds since 1970.

    Attributes:
      first: When the first process of the run began.
      written: Up to when the seconds are counted.
      starts: Number of processes that trained, or of calls of `ddl.fit`.
      reached: The largest step reached.
      repeated: Number of updates made again, after a restart or a rewind.
      seconds: Seconds by kind of work; they add up to `written - first`.
    """

    first: float
    written: float
    starts: int = 0
    reached: int = 0
    repeated: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """The share of updates that were neither repeated nor waited for input; NaN for no time."""
        total = sum(self.seconds.values())
        return self.seconds.get("loop", 0.0) / total if total > 0 else math.nan

    def add(self, kind: str, seconds: float) -> None:
        """Adds seconds of a kind."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds


def read(path: Path) -> Life | None:
    """Reads the life of a run; None if there is no file.

    Raises:
      OSError: If the file cannot be read, or is a link.
      ValueError: If ddl did not write it.
    """
    try:
        with open(path, "rb", opener=open_itself) as file:
            content = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        return None
    try:
        if len(content) > _LARGEST_FILE:
            raise ValueError
        values = json.loads(content)
        life = Life(**{field.name: values[field.name] for field in dataclasses.fields(Life)})
        numbers = [life.first, life.written, life.starts, life.reached, life.repeated]
        numbers += life.seconds.values()
        if not all(type(one) in (int, float) and 0 <= one < 1e15 for one in numbers):
            raise ValueError
        life.seconds = {kind: life.seconds[kind] for kind in KINDS if kind in life.seconds}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("it is not as ddl writes it") from error
    return life


class Goodput:
    """Counts the life of a run in its file, on the chief.

    A kill loses the seconds since the last write, at most some more than 5: the next start counts
    them as down. A failed write is reported once, and tried again.
    """

    def __init__(
        self,
        path: Path | None,
        began: float,
        seconds: Callable[[], Mapping[str, float]],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ):
        """Reads the earlier life of the run; writes nothing.

        Args:
          path: The file; None keeps the life in memory.
          began: When this start of the run began, in seconds since 1970.
          seconds: Returns the seconds of each kind in this process so far.
          report: Prints a line.
          clock: Returns seconds since 1970; tests pass another clock.
        """
        self._path = path
        self._seconds = seconds
        self._report = report
        self._clock = clock
        self._fails = False
        self._step = 0
        self._last: Mapping[str, float] = {}
        self.life = self._earlier(began)
        self.life.add("down", max(0.0, began - self.life.written))
        self.life.starts += 1
        self._last = seconds()
        now = clock()
        counted = sum(self._last.values())
        self.life.add("start_up", max(0.0, now - began - counted))
        for kind, value in self._last.items():
            self.life.add(kind, value)
        self.life.written = now
        self._next_write = now

    def _earlier(self, began: float) -> Life:
        life = None
        if self._path is not None:
            try:
                life = read(self._path)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                self._report(
                    f"{self._path} cannot be read: {reason}. The goodput counts from this start on."
                )
        return life or Life(began, began)

    def begin(self, step: int) -> None:
        """Begins to count updates from a step on, as after a restore."""
        self._add()
        self._step = step

    def loop_ended(self, step: int) -> None:
        """Notes a step reached, and writes the file if the last write is some time ago.

        Updates up to the largest step that the run has reached are repeated ones.
        """
        made = max(0, step - self._step)
        again = min(max(self.life.reached - self._step, 0), made)
        if again:  # else a later call adds the time: a reading would cost some in each short loop
            self._add(again / made)
        self.life.repeated += again
        self.life.reached = max(self.life.reached, step)
        self._step = step
        if self._clock() >= self._next_write:
            self.write()

    def _add(self, repeated: float = 0.0) -> None:
        """Adds the time since the last call, and a share of the loop's to the repeated updates."""
        now = self._seconds()
        for kind, value in now.items():
            new = value - self._last.get(kind, 0.0)
            if kind in ("loop", "input"):
                self.life.add("repeated", new * repeated)
                new *= 1 - repeated
            self.life.add(kind, new)
        self._last = now
        self.life.written = self.life.first + sum(self.life.seconds.values())

    def write(self) -> None:
        """Writes the file, with all time up to now."""
        self._add()
        self._next_write = self._clock() + _SECONDS_BETWEEN_WRITES
        if self._path is None:
            return
        seconds = {k: round(self.life.seconds[k], 3) for k in KINDS if k in self.life.seconds}
        content = {**dataclasses.asdict(self.life), "seconds": seconds}
        try:
            write_atomically(self._path, json.dumps(content) + "\n", synced=False)
            self._fails = False
        except OSError as error:
            if not self._fails:
                self._report(f"{unwritable(self._path, error)} The next write tries again.")
            self._fails = True


def line(life: Life) -> str:
    """Returns the life of a run in one line."""
    total = sum(life.seconds.values())
    others = sorted(
        ((seconds, kind) for kind, seconds in life.seconds.items() if kind != "loop"), reverse=True
    )
    parts = [
        f"{NAMES[kind]} {seconds:,.1f} s" for seconds, kind in others if seconds >= 0.005 * total
    ]
    starts = "" if life.starts == 1 else f" in {life.starts:,} starts"
    return (
        f"Goodput {life.goodput:.1%}: {life.seconds.get('loop', 0.0):,.1f} s of updates in "
        f"{total:,.1f} s{starts}{'; ' if parts else ''}{', '.join(parts)}."
    )
