"""The charts of a report: which figures are drawn where, and their points as JSON."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from ddl.output import printable
from ddl.report.curves import Curve
from ddl.report.finals import direction_in
from ddl.report.record import Record

# Ranges of steps in a curve on the page. A chart is about 500 pixels wide.
RANGES = 400
MOST_CHARTS = 60

# The order of the charts, by patterns that match whole names. All other figures are metrics.
_ORDER = (
    r"loss(/.*)?",
    _METRICS := "",
    r"learning_rate(/.*)?|loss_weight/.*",
    r"gradient_.*|.*norm(/.*)?|loss_scale|skipped_updates|rewinds",
    r"examples_per_second|steps_per_second|mfu|.*seconds(/.*)?|time/.*|.*share(/.*)?",
    r"process_memory_mib|gpu_.*|slowest_worker",
)
_DRAWN_WHEN_NAMED = "time/*"  # the charts of `time_share/*` show the same


class Chart(NamedTuple):
    """A chart of one figure, for all runs and splits.

    Attributes:
      name: Name of the figure.
      curves: The number of the run, the split and the curve.
      better: `higher is better`, `lower is better` or empty.
    """

    name: str
    curves: list[tuple[int, str, Curve]]
    better: str


def charts(records: Sequence[Record], patterns: Sequence[str] = ()) -> list[Chart]:
    """Returns the charts: losses, metrics, learning rates, norms and scales, speed.

    Args:
      records: The runs.
      patterns: Names of the figures to draw, in which `*` stands for any text; none draws all.
    """
    by_name: dict[str, list[tuple[int, str, Curve]]] = {}
    for number, record in enumerate(records):
        for (split, name), curve in record.curves.items():
            if _is_drawn(name, patterns):
                by_name.setdefault(name, []).append((number, split, curve))
    names = sorted(by_name, key=lambda name: (_place(name), name.count("/"), _natural(name)))
    better = {"max": "higher is better", "min": "lower is better", None: ""}
    return [
        Chart(
            name,
            sorted(by_name[name], key=lambda each: (each[0], each[1] != "train", each[1])),
            better[direction_in(records, name)],
        )
        for name in names
    ]


def _is_drawn(name: str, patterns: Sequence[str]) -> bool:
    if not patterns:
        return not fnmatchcase(name, _DRAWN_WHEN_NAMED)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _place(name: str) -> int:
    found = (i for i, names in enumerate(_ORDER) if names and re.fullmatch(names, name, re.DOTALL))
    return next(found, _ORDER.index(_METRICS))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key by which `f1/2` comes before `f1/10`."""
    return [
        (int(part) if part.isdecimal() and len(part) < 16 else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def colors(records: Sequence[Record]) -> list[int]:
    """Returns the number of each run's colour; runs without curves take none.

    Args:
      records: The runs.
    """
    return list(itertools.accumulate((bool(record.curves) for record in records[:-1]), initial=0))


def data(drawn: Sequence[Chart], names: Sequence[str], records: Sequence[Record]) -> str:
    """Returns the points of the charts as JSON that may stand in a script element.

    Args:
      drawn: The charts.
      names: Names of the runs, as they are shown.
      records: The runs.
    """
    content = {
        "runs": [
            {
                "name": name,
                "color": color,
                "restarts": [s.step for s in record.starts[1:21] if s.step is not None],
            }
            for name, record, color in zip(names, records, colors(records), strict=True)
        ],
        "charts": [
            {"name": one_line(chart.name), "curves": [_points(*curve) for curve in chart.curves]}
            for chart in drawn
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # Else a name with </script> would end the element.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _points(run: int, split: str, curve: Curve) -> dict[str, Any]:
    rows = curve.rows(RANGES)
    return {
        "run": run,
        "split": one_line(split),
        "step": [_short(step) for step in rows[:, 0]],
        "epoch": [_short(epoch) for epoch in rows[:, 1]],
        "value": [_short(value) for value in rows[:, 2]],
    }


def _short(value: np.floating[Any]) -> float | int | None:
    """Returns a number with at most seven digits; None for a NaN."""
    number = float(value)
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    return float(f"{number:.7g}")


def is_thinned(drawn: Sequence[Chart]) -> bool:
    """Returns whether a chart has a curve that is thinned."""
    return any(
        len(curve.rows(RANGES)) < curve.points and curve.points > 4 * RANGES
        for chart in drawn
        for _, _, curve in chart.curves
    )


def one_line(text: str) -> str:
    """Escapes control characters, newlines included, and lone surrogates."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
