"""The times of an update by phase, from the profiles of runs."""

import re
from collections.abc import Sequence
from pathlib import Path

from ddl.report.files_of_run import reason_of
from ddl.run.timing.phase_times import NAME, PHASES, PhaseTimes, read

_MOST = 20


def profiles(run: Path) -> tuple[list[tuple[str, PhaseTimes]], list[str]]:
    """Returns the profiles of a run by name, and what is wrong with some.

    Args:
      run: The directory of the run.
    """
    found, faults = [], []
    folder = run / "profile"
    files = [*folder.glob(f"*/{NAME}"), *folder.glob(f"worker-*/*/{NAME}")]
    paths = sorted(files, key=_steps_and_path)
    for path in paths[:_MOST]:
        worker = path.parents[1].name
        where = f"{worker}, " if worker.startswith("worker-") else ""
        try:
            times = read(path)
        except (OSError, ValueError) as error:
            faults.append(f"{path.relative_to(run)} cannot be read: {reason_of(error)}.")
            continue
        found.append((f"{where}steps {times.first:,} to {times.last:,}", times))
    if len(paths) > _MOST:
        faults.append(f"There are {len(paths)} profiles. The report has the first {_MOST}.")
    return sorted(found, key=lambda each: (each[1].first, each[0])), faults


def _steps_and_path(path: Path) -> tuple[list[int], str]:
    """Returns what sorts profiles by their steps, such as 90:100 before 100:110."""
    return [int(number) for number in re.findall(r"\d+", path.parent.name)], str(path)


def profile_rows(given: Sequence[PhaseTimes]) -> list[tuple[str, list[str]]]:
    """Returns the rows of a table: a name, and a text for each profile."""
    totals = [sum(one.milliseconds.values()) or 1.0 for one in given]
    rows = [("devices", [one.devices for one in given])]
    for phase, name in PHASES.items():
        cells = [
            f"{(time := one.milliseconds[phase]):,.3g} ms ({time / total:.1%})"
            for one, total in zip(given, totals, strict=True)
        ]
        rows.append((name, cells))
    return rows
