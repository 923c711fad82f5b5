"""ddl beside its rivals in fresh processes: running them, and the targets for their ratios."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.repeats import interleaved, over_processes, rotated
from benchmarks.report import Bar, Cell, Spread, Table
from benchmarks.turns import Contender, Failed

DDL = "ddl"
BARE = "bare loop"
LARGEST_OF_BARE = 1.05


@dataclasses.dataclass
class Found:
    """Milliseconds an update of each contender, one figure a process, and the failures."""

    times: dict[str, np.ndarray]
    failures: dict[str, str]

    def ratio(self, name: str, other: str) -> Spread | None:
        """Returns the ratio of two contenders' times, each process with the one beside it."""
        if name not in self.times or other not in self.times:
            return None
        return over_processes(self.times[name] / self.times[other], is_ratio=True)

    def fastest(self, names: Sequence[str]) -> str | None:
        """Returns the name of the fastest of those that have run."""
        run = [name for name in names if name in self.times]
        return min(run, key=lambda name: float(np.median(self.times[name])), default=None)


def run(functions: Mapping[str, str], case: Any, processes: int, rounds: int) -> Found:
    """Runs a case with fresh processes of each contender, one computing at a time.

    Args:
      functions: "module:name" of each contender's function, by the contender's name. It reports
        seconds an update.
      case: Passed to each function.
      processes: Number of processes of each contender, one after the other.
      rounds: Windows of each process.
    """
    return run_each({name: (each, case) for name, each in functions.items()}, processes, rounds)


def run_each(functions: Mapping[str, tuple[str, Any]], processes: int, rounds: int) -> Found:
    """Runs contenders that may have different cases, as `run` does.

    Args:
      functions: By name, "module:name" of the contender's function, and its case.
      processes: Number of processes of each contender, one after the other.
      rounds: Windows of each process.
    """
    medians: dict[str, list[float]] = {name: [] for name in functions}
    failures: dict[str, str] = {}
    for number in range(processes):
        contenders = {
            name: Contender(function, [case], {})
            for name, (function, case) in rotated(functions, number).items()
            if name not in failures
        }
        try:
            windows = {}
            for name, contender in contenders.items():
                try:
                    contender.window()  # builds and traces
                    contender.window()
                    windows[name] = contender.window
                except Failed as failure:
                    failures[name] = str(failure)
            for name, seconds in interleaved(windows, rounds).items():
                medians[name].append(float(np.median(seconds)) * 1e3)
        finally:
            for contender in contenders.values():
                contender.close()
    return Found(
        {name: np.array(each) for name, each in medians.items() if name not in failures}, failures
    )


def milliseconds(title: str, found: Mapping[str, Found], names: Sequence[str]) -> Table:
    """Builds the table of each contender's milliseconds an update, a column for each case."""
    rows: list[list[Cell]] = [
        [name, *(over_processes(f.times[name]) if name in f.times else "–" for f in found.values())]
        for name in names
    ]
    return Table(title, ["", *found], rows)


def bars(case: str, found: Found, rivals: Mapping[str, Sequence[str]]) -> list[Bar]:
    """Returns the targets: ddl is not slower than its rivals, and hardly than the bare loop.

    Args:
      case: Name of the case.
      found: What was measured.
      rivals: By the name of a rival, the contenders of which the fastest counts.
    """
    made = []
    for rival, names in rivals.items():
        value = found.ratio(found.fastest(names) or "", DDL)
        if value is not None:
            made.append(Bar(f"{case}: ddl's speed / {rival}'s", value, 1.0))
    if (value := found.ratio(DDL, BARE)) is not None:
        made.append(Bar(f"{case}: ddl's time / the {BARE}'s", value, LARGEST_OF_BARE, "at most"))
    return made


def notes(found: Mapping[str, Found]) -> list[str]:
    """Returns a note for each contender that failed."""
    return [
        f"{name}, {case}: {why}" for case, f in found.items() for name, why in f.failures.items()
    ]
