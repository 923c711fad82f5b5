"""Seconds that this process spends in each kind of work, by its phases."""

import time
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from ddl.diagnosis.phases import Phase, kinds_of_work

Kind = Literal[
    "loop",
    "input",
    "repeated",
    "tracing",
    "evaluation",
    "saving",
    "restoring",
    "callbacks",
    "workers",
    "between",
    "start_up",
    "down",
]
"""Kinds of work: the training loop without the next two; waiting for input in it; repeated updates;
tracing, with the first loop; evaluations; saves; restores; callbacks and actions; waiting for the
other workers between loops; other Python code between loops; the start-up; no process at all."""

KINDS: tuple[Kind, ...] = get_args(Kind)


class Times:
    """The seconds of each kind of work since it was made. An observer of phases.

    Each moment counts once: as the kind of the innermost phase that has one. All that a callback
    does is a callback's, such as an evaluation, but for its waits for the other workers.
    """

    def __init__(self, rest: Kind, clock: Callable[[], float] = time.monotonic):
        """Begins to count.

        Args:
          rest: The kind of moments in which no phase has a kind.
          clock: Returns seconds; tests pass another clock.
        """
        self._rest = rest
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def __call__(self, phase: Phase, begins: bool) -> None:
        """Ends what came before the begin or the end of a phase."""
        self._settle()

    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds of each kind up to now; a kind without any may be missing."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        now, kinds = self._clock(), kinds_of_work()
        kind = kinds[-1] if kinds else self._rest
        if "callbacks" in kinds and kind != "workers":
            kind = "callbacks"
        self._seconds[kind] = self._seconds.get(kind, 0.0) + now - self._since
        self._since = now
