"""The last values of the runs' figures, and which of them is best."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ddl.errors import ConfigError
from ddl.figures import Direction, direction_of, is_measured
from ddl.report.bindings import text_of
from ddl.report.curves import Point
from ddl.report.record import Record

# Bindings that name a figure and its direction.
_CHOICES = (
    ("Retention.best_metric", "Retention.best_mode"),
    ("EarlyStopping.metric", "EarlyStopping.mode"),
    ("ReduceOnPlateau.metric", "ReduceOnPlateau.mode"),
)


class Final(NamedTuple):
    """A figure at the end of a run.

    Attributes:
      last: The last point; None if the run has no such figure.
      best: The best point of the run; None without a known direction or a finite value.
      wins: Whether the last value is the best of all runs.
    """

    last: Point | None
    best: Point | None
    wins: bool


class Row(NamedTuple):
    """A figure of all runs.

    Attributes:
      name: Name of the figure.
      split: Such as `eval`.
      direction: Whether larger or smaller is better; None if unknown.
      finals: One for each run.
    """

    name: str
    split: str
    direction: Direction | None
    finals: list[Final]


def rows(records: Sequence[Record]) -> list[Row]:
    """Returns a row for each figure: evaluations first, then training.

    Args:
      records: The runs.
    """
    known = {key for record in records for key in record.curves if not is_measured(key[1])}
    keys = sorted(known, key=order)
    found = []
    for split, name in keys:
        direction = direction_in(records, name)
        curves = [record.curves.get((split, name)) for record in records]
        last = [curve.last if curve else None for curve in curves]
        best = [curve.best(direction) if curve and direction else None for curve in curves]
        # A run of a sanity mode wins nothing: it has trained on other data.
        real = [
            p if record.sanity_mode is None else None
            for p, record in zip(last, records, strict=True)
        ]
        values = [p.value for p in real if p is not None and not math.isnan(p.value)]
        winner = None
        if direction is not None and len(values) > 1:
            winner = max(values) if direction == "max" else min(values)
        finals = [
            Final(p, b, of_real is not None and of_real.value == winner)
            for p, b, of_real in zip(last, best, real, strict=True)
        ]
        found.append(Row(name, split, direction, finals))
    return found


def order(key: tuple[str, str]) -> tuple[bool, str, bool, str]:
    """Returns the place of a split and figure: `eval` first, the loss first, then by name."""
    split, name = key
    return split != "eval", split, name != "loss", name


def direction_in(records: Sequence[Record], name: str) -> Direction | None:
    """Returns the direction of a figure: that of the runs' configs, or the known one.

    Args:
      records: The runs. If their configs contradict each other, the direction is unknown.
      name: Name of the figure, such as `accuracy`.
    """
    given: set[Direction] = set()
    for record in records:
        for metric, mode in _CHOICES:
            direction = text_of(record.bindings, mode)
            if text_of(record.bindings, metric) == name and direction in ("max", "min"):
                given.add("max" if direction == "max" else "min")
    if len(given) > 1:
        return None
    try:
        return direction_of(name, next(iter(given), None), "mode")
    except ConfigError:
        return None


def number(value: float) -> str:
    """Returns a figure with up to six digits; `not finite` for a NaN."""
    if math.isnan(value):
        return "not finite"
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    text = f"{value:,.6g}"
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", text)
