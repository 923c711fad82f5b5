"""The phases that a process is in, such as the training loop within a run.

The main thread enters and leaves phases. Any thread may describe them: while the main thread waits
in TensorFlow, no stack says which batches it computes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

_ATTRIBUTE = "_ddl_phases"  # of an error


class _Phase(NamedTuple):
    name: str
    details: Callable[[], str] | None
    since: float


_PHASES: list[_Phase] = []  # the outermost first


@contextlib.contextmanager
def during(name: str, details: Callable[[], str] | None = None) -> Iterator[None]:
    """Marks the `with` block, or a decorated function, as a phase of this process.

    An error that leaves the block keeps a description of the phases that it was raised in.

    Args:
      name: What the process does, such as "the training loop".
      details: Returns a text that follows the name, when a description is asked for. Any thread may
        call it.
    """
    phase = _Phase(name, details, time.monotonic())
    _PHASES.append(phase)
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _ATTRIBUTE):
            with contextlib.suppress(AttributeError):  # an error with slots
                setattr(error, _ATTRIBUTE, described())
        raise
    finally:
        with contextlib.suppress(ValueError):
            _PHASES.remove(phase)


def described() -> str:
    """Returns a line for each phase, the outermost first, with its duration in seconds."""
    phases = list(_PHASES)
    if not phases:
        return f"Process {os.getpid()} is in no phase of a run."
    lines = [f"Process {os.getpid()} is in"]
    for depth, phase in enumerate(phases, start=1):
        try:
            details = "" if phase.details is None else phase.details()
        except Exception as error:  # the state of a loop that has failed
            details = f" ({type(error).__name__})"
        seconds = time.monotonic() - phase.since
        lines.append(f"{'  ' * depth}{phase.name}{details}, for {seconds:,.1f} s")
    return "\n".join(lines)


def described_of(error: BaseException) -> str:
    """Returns the description of the phases in which an error, or one of its causes, was raised."""
    link: BaseException | None = error
    found = None
    while link is not None:
        found = getattr(link, _ATTRIBUTE, found)
        link = link.__cause__ or link.__context__
    return found or described()
