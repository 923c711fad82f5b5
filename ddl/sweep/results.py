"""The end of a sweep: a table of its runs with the chosen metric, as text, JSON and CSV."""

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ModelDirectoryError
from ddl.figures import Direction
from ddl.files import unwritable
from ddl.output import printable
from ddl.sweep.axes import SEED, Point
from ddl.sweep.definition import RUNS
from ddl.sweep.files import Progress
from ddl.sweep.halving import Decision

_WIDEST = 500  # columns of a pipe, which has no width: lines stay whole


class Row(NamedTuple):
    """A run of a sweep.

    Attributes:
      name: Name of the run.
      point: Its swept bindings.
      state: In a few words: finished, diverged, failed, stopped, unfinished.
      finished: Whether it is finished; only finished runs are compared.
      step: Its last step.
      total: Steps of the whole run; None if unknown.
      value: The last value of the metric; None if there is none.
    """

    name: str
    point: Point
    state: str
    finished: bool
    step: int
    total: int | None
    value: float | None


class Setting(NamedTuple):
    """The runs that differ in the seed alone.

    Attributes:
      point: Their swept bindings without the seed.
      seeds: Number of finished runs.
      runs: Number of runs.
      mean: Mean of the metric over the finished runs; None if there is none.
      deviation: Standard deviation of a run, with n - 1; None for fewer than two runs.
    """

    point: Point
    seeds: int
    runs: int
    mean: float | None
    deviation: float | None


def rows(
    points: Mapping[str, Point],
    runs: Mapping[str, Progress],
    errors: Mapping[str, int],
    decisions: Mapping[str, Decision],
    direction: Direction,
) -> list[Row]:
    """Returns the runs: the finished ones first, the best one first.

    Args:
      points: The points by the names of the runs.
      runs: How far each run has come.
      errors: Exit statuses of the runs that were given up.
      decisions: The decisions of successive halving.
      direction: Whether the largest or the smallest value is best.
    """
    found = []
    for name, point in points.items():
        run = runs[name]
        if run.finished:
            state = "finished"
        elif run.diverged:
            state = "diverged"
        elif name in errors:
            state = f"failed with status {errors[name]}"
        elif decisions[name].action == "stop":
            state = f"stopped at rung {decisions[name].rung:,}"
        else:
            state = "unfinished" if run.step else "not begun"
        found.append(Row(name, point, state, run.finished, run.step, run.total, run.last))
    return sorted(found, key=lambda row: (not row.finished, badness(row.value, direction)))


def settings(found: Sequence[Row], direction: Direction) -> list[Setting]:
    """Returns the settings with mean and deviation over their finished runs, the best first.

    Args:
      found: The runs.
      direction: Whether the largest or the smallest mean is best.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in found:
        key = tuple(sorted((name, text) for name, text in row.point.items() if name != SEED))
        groups.setdefault(key, []).append(row)
    made = []
    for key, group in groups.items():
        values = [row.value for row in group if row.finished and row.value is not None]
        mean = statistics.fmean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 and _all_finite(values) else None
        made.append(Setting(dict(key), len(values), len(group), mean, deviation))
    return sorted(made, key=lambda one: (one.seeds < one.runs, badness(one.mean, direction)))


def badness(value: float | None, direction: Direction) -> float:
    """Returns a sort key: smaller for a better value; infinity for none or a NaN."""
    if value is None or math.isnan(value):
        return math.inf
    return -value if direction == "max" else value


def show(found: Sequence[Row], metric: str, direction: Direction, columns: int | None) -> None:
    """Prints the table of the runs and, over several seeds, that of the settings; the best in bold.

    Args:
      found: The runs, as `rows` returns them.
      metric: Name of the metric.
      direction: Whether the largest or the smallest value is best.
      columns: Width of the terminal; None for a pipe.
    """
    console = Console(width=columns or _WIDEST, highlight=False, soft_wrap=columns is None)
    names = list(dict.fromkeys(name for row in found for name in row.point))
    table = _table([*names, metric, "step", "state"])
    for row in found:
        of = "" if row.total in (None, row.step) else f" of {row.total:,}"
        cells = [row.point.get(name, "") for name in names]
        cells += [number(row.value), f"{row.step:,}{of}", row.state]
        best = row.finished and _is_best(row.value, [r.value for r in found if r.finished])
        _add(table, cells, best and row is found[0])
    console.print(table)
    by_setting = settings(found, direction)
    if len(by_setting) == len(found):
        return
    names = [name for name in names if name != SEED]
    table = _table([*names, f"mean {metric}", "deviation", "seeds"])
    for one in by_setting:
        cells = [one.point.get(name, "") for name in names]
        cells += [number(one.mean), number(one.deviation)]
        cells += [f"{one.seeds}" if one.seeds == one.runs else f"{one.seeds} of {one.runs}"]
        _add(table, cells, one is by_setting[0] and one.seeds == one.runs)
    console.print()
    console.print(table)


def write(
    folder: Path, found: Sequence[Row], metric: str, split: str, direction: Direction
) -> None:
    """Writes results.json and results.csv to the folder of the sweep.

    Raises:
      ModelDirectoryError: If a file cannot be written.
    """
    names = list(dict.fromkeys(name for row in found for name in row.point))
    best = found[0].name if found and found[0].finished and found[0].value is not None else None
    content: dict[str, Any] = {"metric": metric, "split": split, "direction": direction}
    content["best"] = best
    content["runs"] = [
        {
            **{"name": row.name, "model_dir": str(Path(RUNS, row.name)), "bindings": row.point},
            **{"state": row.state, "step": row.step, "total_steps": row.total},
            metric: _finite(row.value),
        }
        for row in found
    ]
    content["settings"] = [
        {
            **{"bindings": one.point, "seeds": one.seeds, "runs": one.runs},
            **{"mean": _finite(one.mean), "deviation": _finite(one.deviation)},
        }
        for one in settings(found, direction)
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *names, metric, "step", "total_steps", "state"])
    for row in found:
        own = [row.point.get(name, "") for name in names]
        value = "" if row.value is None else repr(row.value)
        total = "" if row.total is None else row.total
        writer.writerow([row.name, *own, value, row.step, total, row.state])
    for name, written in (
        ("results.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n"),
        ("results.csv", text.getvalue()),
    ):
        try:
            write_atomically(folder / name, written)
        except OSError as error:
            raise ModelDirectoryError(unwritable(folder / name, error)) from error


def number(value: float | None) -> str:
    """Returns a value with up to six digits; a dash for none."""
    if value is None:
        return "–"
    return "not finite" if math.isnan(value) else f"{value:.6g}"


def _table(names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="underline")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    return table


def _add(table: Table, cells: Sequence[str], best: bool) -> None:
    style = "bold" if best else ""
    table.add_row(*(Text(printable(cell), style=style) for cell in cells))


def _is_best(value: float | None, values: Sequence[float | None]) -> bool:
    known = [one for one in values if one is not None and not math.isnan(one)]
    return value in known


def _all_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
