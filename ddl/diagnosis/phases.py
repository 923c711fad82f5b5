"""The phases that a process is in, such as the training loop within a run.

The main thread enters and leaves phases. Any thread may describe them: while the main thread waits
in TensorFlow, no stack says which batches it computes. Observers, such as `ddl.diagnosis.times`,
learn when a phase begins and ends.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

_ATTRIBUTE = "_ddl_phases"  # of an error


class Phase(NamedTuple):
    """A phase of this process.

    Attributes:
      name: Name of the work, such as "the training loop".
      details: Returns a text that follows the name; None for no text.
      since: When it began, as `time.monotonic` tells it.
      kind: Kind of work that its time counts as; None for that of the phase around it.
    """

    name: str
    details: Callable[[], str] | None
    since: float
    kind: str | None

    def described(self) -> str:
        """Returns the name and the details."""
        try:
            return self.name + ("" if self.details is None else self.details())
        except Exception as error:  # the state of a loop that has failed
            return f"{self.name} ({type(error).__name__})"


Observer = Callable[[Phase, bool], None]
"""Called in the thread of a phase just before it begins (True) or ends (False). Must not raise."""

_PHASES: list[Phase] = []  # the outermost first
_OBSERVERS: list[Observer] = []


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Calls an observer at each begin and end of a phase within the `with` block."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def kinds_of_work() -> list[str]:
    """Returns the kinds of the phases that have one, the outermost first."""
    return [phase.kind for phase in _PHASES if phase.kind is not None]


@contextlib.contextmanager
def during(
    name: str, details: Callable[[], str] | None = None, kind: str | None = None
) -> Iterator[None]:
    """Marks the `with` block, or a decorated function, as a phase of this process.

    An error that leaves the block keeps a description of the phases that it was raised in.

    Args:
      name: Name of the work, such as "the training loop".
      details: Returns a text that follows the name, when a description is asked for. Any thread may
        call it.
      kind: Kind of work that the time of the phase counts as; None for that of the phase around it.
    """
    phase = Phase(name, details, time.monotonic(), kind)
    _notify(phase, True)
    _PHASES.append(phase)
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _ATTRIBUTE):
            with contextlib.suppress(AttributeError):  # an error with slots
                setattr(error, _ATTRIBUTE, described())
        raise
    finally:
        _notify(phase, False)
        with contextlib.suppress(ValueError):
            _PHASES.remove(phase)


def _notify(phase: Phase, begins: bool) -> None:
    for observer in tuple(_OBSERVERS):
        observer(phase, begins)


def described() -> str:
    """Returns a line for each phase, the outermost first, with its duration in seconds."""
    phases = list(_PHASES)
    if not phases:
        return f"Process {os.getpid()} is in no phase of a run."
    lines = [f"Process {os.getpid()} is in"]
    for depth, phase in enumerate(phases, start=1):
        seconds = time.monotonic() - phase.since
        lines.append(f"{'  ' * depth}{phase.described()}, for {seconds:,.1f} s")
    return "\n".join(lines)


def described_of(error: BaseException) -> str:
    """Returns the description of the phases in which an error, or one of its causes, was raised."""
    link: BaseException | None = error
    found = None
    while link is not None:
        found = getattr(link, _ATTRIBUTE, found)
        link = link.__cause__ or link.__context__
    return found or described()
