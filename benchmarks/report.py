"""Reports of benchmarks, and interleaved repeats."""

import dataclasses
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

RESULTS = Path(__file__).parent / "results"
PEERS = Path(__file__).parent / "peers"


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, first and third quartile of repeats."""

    median: float
    low: float
    high: float


Cell: TypeAlias = str | int | float | Spread


@dataclasses.dataclass(frozen=True)
class Bar:
    """A target and its measurement: `value` must be at least, or at most, `limit`."""

    what: str
    value: float | Spread
    limit: float
    kind: Literal["at least", "at most"] = "at least"

    @property
    def met(self) -> bool:
        """Whether the value, or its median, meets the target."""
        value = self.value.median if isinstance(self.value, Spread) else self.value
        return value >= self.limit if self.kind == "at least" else value <= self.limit


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with column titles; the first cell names its row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclasses.dataclass(frozen=True)
class Series:
    """A line, or bars of one colour: y over x. The x are numbers for a line, names for bars."""

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float | Spread]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot in a benchmark's picture. Names on x make bars, numbers make lines.

    Attributes:
      title: Title above the plot.
      x_label: Label of the x axis.
      y_label: Label of the y axis.
      series: The lines or bars.
      log_x: Whether x doubles at each tick.
      log_y: Whether y is logarithmic.
      level: Height of a dashed line, such as 1 for ratios.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    level: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a benchmark, ratios first."""

    tables: Sequence[Table]
    bars: Sequence[Bar] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the report as values that JSON can hold."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Report":
        """Builds a report from the values of `as_json`."""

        def cell(value: Any) -> Cell:
            return Spread(**value) if isinstance(value, dict) else value

        def series(values: Mapping[str, Any]) -> Series:
            return Series(**{**values, "y": [cell(y) for y in values["y"]]})

        return Report(
            [
                Table(t["title"], t["columns"], [[*map(cell, r)] for r in t["rows"]])
                for t in values["tables"]
            ],
            [Bar(**{**bar, "value": cell(bar["value"])}) for bar in values["bars"]],
            [Plot(**{**p, "series": [*map(series, p["series"])]}) for p in values["plots"]],
            values["notes"],
        )


# ------------------------------------------------------------ repeats


def plot_of(table: Table, columns: Sequence[str], y_label: str, **options: Any) -> Plot:
    """Plots some columns of a table as bars, one group for each row, named by its first cell.

    Args:
      table: The table, whose title the plot has.
      columns: Names of the columns; cells that are not numbers are left out.
      y_label: Label of the y axis.
      **options: Other attributes of `Plot`, such as `level`.
    """
    series = []
    for name in columns:
        place = list(table.columns).index(name)
        cells = [
            (textwrap.fill(str(row[0]), 14, break_long_words=False), row[place])
            for row in table.rows
        ]
        drawn = [(x, y) for x, y in cells if not isinstance(y, str)]
        series.append(Series(name, [x for x, _ in drawn], [y for _, y in drawn]))
    return Plot(table.title, table.columns[0], y_label, series, **options)


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, np.ndarray]:
    """Measures each contender once per round.

    All contenders of a round run under a similar load of the machine. The order rotates from round
    to round, so that the first contender changes.

    Args:
      contenders: By name, the function that returns a figure, such as a time.
      rounds: Number of rounds.

    Returns:
      The figures of each contender, [rounds].
    """
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name]())
    return {name: np.array(values) for name, values in found.items()}


def seconds(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def spread(values: Any) -> Spread:
    """Returns the spread of repeats. For a ratio, divide two contenders' figures per round."""
    low, median, high = np.percentile(np.asarray(values, float), (25, 50, 75))
    return Spread(float(median), float(low), float(high))
