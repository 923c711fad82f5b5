"""The seconds of a log period by kind of work, of this worker and of the slowest."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from ddl.diagnosis.times import KINDS
from ddl.distribution.workers import Workers
from ddl.figures import SLOWEST_WORKER, TIME, TIME_SHARE

INPUT_BOUND = 0.2
"""A run is input-bound if its training loop waits for input for at least this share of its time."""

_JUDGED_SECONDS = 1.0
_LAGGING = 0.1  # of a period


class PeriodSplit:
    """Splits the time since the last log. Eager, on all workers.

    Says in words, once each, that the run is input-bound, and which worker holds up the others.
    """

    def __init__(
        self,
        seconds: Callable[[], Mapping[str, float]],
        workers: Workers,
        step: int,
        report: Callable[[str], None],
    ):
        """Begins the first period.

        Args:
          seconds: Returns the seconds of each kind of work so far; see `split_off`.
          workers: The workers.
          step: The step that the run begins at.
          report: Prints a line.
        """
        self._seconds = seconds
        self._workers = workers
        self._report = report
        self._last = seconds()
        self._judged = np.zeros(2)  # seconds of input and of the rest of the loop, not judged yet
        self._judged_from = step
        self._is_input_bound = False
        self._slowest: set[int] = set()

    def figures(self, step: int) -> dict[str, float]:
        """Returns the figures of the period that ends at a step, and begins the next one.

        Returns:
          "time/KIND" in seconds and "time_share/KIND" of the period, for each kind with any time,
          and for "input" if it can be measured; with several workers "slowest_worker".
        """
        now = self._seconds()
        period = {kind: now[kind] - self._last.get(kind, 0.0) for kind in now}
        self._last = now
        # The moments before the run's first loop.
        period["between"] = period.get("between", 0.0) + period.pop("start_up", 0.0)
        total = max(sum(period.values()), 1e-9)
        shown = [k for k in KINDS if period.get(k, 0.0) > 0 or (k == "input" and k in period)]
        found = {f"{TIME}/{kind}": round(period[kind], 6) for kind in shown}
        found |= {f"{TIME_SHARE}/{kind}": round(period[kind] / total, 6) for kind in shown}
        waits = np.array([period.get("input", math.nan), period.get("loop", 0.0)])
        if self._workers.number > 1:
            # One collective for each log. A worker that does something else between the loops keeps
            # the others waiting in collectives, which do not count as its own time.
            own = total - sum(period.get(kind, 0.0) for kind in ("loop", "tracing", "workers"))
            rows = self._workers.gather(np.array([own, total, *np.nan_to_num(waits, nan=-1.0)]))
            found[SLOWEST_WORKER] = float(np.argmax(rows[:, 0]))
            self._judge_workers(rows)
            waits = rows[np.argmax(rows[:, 2]), 2:]
        self._judge_input(step, waits)
        return found

    def _judge_workers(self, rows: np.ndarray) -> None:
        slowest = int(np.argmax(rows[:, 0]))
        own, total = rows[slowest, :2]
        others = float(np.median(np.delete(rows[:, 0], slowest)))
        if own - others > _LAGGING * total and slowest not in self._slowest:
            self._slowest.add(slowest)
            self._report(
                f"Worker {slowest} holds up the others: in the last {total:,.1f} s it spent "
                f"{own:,.1f} s on input, or outside of the training loop, and the other workers "
                f"{others:,.1f} s."
            )

    def _judge_input(self, step: int, waits: np.ndarray) -> None:
        """Says that a run is input-bound. Judges at least a second of the training loop at once."""
        if not waits[0] >= 0:  # unknown
            return
        self._judged += waits
        waited, loop = float(self._judged[0]), float(self._judged.sum())
        if loop < _JUDGED_SECONDS:
            return
        since, self._judged, self._judged_from = self._judged_from, np.zeros(2), step
        if is_input_bound(waited, loop - waited) and not self._is_input_bound:
            self._is_input_bound = True
            self._report(
                f"The run is input-bound: since step {since:,} the training loop has waited for "
                f"input for {waited:,.1f} s of {loop:,.1f} s ({waited / loop:.0%}). Faster data "
                "would make it faster: docs/profiling.md lists what helps."
            )


def split_off(seconds: Mapping[str, float], waited: float | None) -> dict[str, float]:
    """Returns seconds by kind with those of input apart from those of the loop.

    Args:
      seconds: Seconds of each kind; those of "loop" include the input.
      waited: Seconds of input; None if they are unknown, and stay in "loop".
    """
    found = dict(seconds)
    if waited is not None:
        # Two clocks: the rest of the loop must not become negative.
        found["input"] = min(waited, found.get("loop", 0.0))
        found["loop"] = found.get("loop", 0.0) - found["input"]
    return found


def is_input_bound(waited: float, loop: float) -> bool:
    """Returns whether a training loop is input-bound.

    Args:
      waited: Seconds that it waited for input.
      loop: Its other seconds.
    """
    return waited >= INPUT_BOUND * (waited + loop) > 0
