"""Reports of benchmarks: tables, targets, plots and images."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

RESULTS = Path(__file__).parent / "results"
PEERS = Path(__file__).parent / "peers"


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of repeats and their interval.

    Attributes:
      median: Median of the repeats, or of the medians of several processes.
      low: First quartile of the repeats, or lowest median of a process.
      high: Third quartile of the repeats, or highest median of a process.
      is_ratio: Whether this is a ratio of two contenders, which are level if the interval holds 1.
    """

    median: float
    low: float
    high: float
    is_ratio: bool = False

    @property
    def is_level(self) -> bool:
        """Whether this is a ratio of two contenders whose interval holds 1."""
        return self.is_ratio and self.low <= 1 <= self.high and self.low < self.high


Cell: TypeAlias = str | int | float | Spread


@dataclasses.dataclass(frozen=True)
class Bar:
    """A target and its measurement: `value` must be at least, or at most, `limit`."""

    what: str
    value: float | Spread
    limit: float
    kind: Literal["at least", "at most"] = "at least"

    @property
    def verdict(self) -> Literal["met", "missed", "open"]:
        """Whether the value meets the target; "open" if the limit lies within its interval."""
        is_spread = isinstance(self.value, Spread)
        ends = [self.value.low, self.value.high] if is_spread else [self.value]
        least = self.kind == "at least"
        met = [end >= self.limit if least else end <= self.limit for end in ends]
        return "met" if all(met) else "open" if any(met) else "missed"


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
class Images:
    """Small square images in a benchmark's picture, side by side.

    Attributes:
      title: Title above the images.
      pixels: A text for each image, with a hexadecimal digit for each pixel: f is black.
    """

    title: str
    pixels: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a benchmark, ratios first."""

    tables: Sequence[Table]
    bars: Sequence[Bar] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    images: Sequence[Images] = ()

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
            [Images(**images) for images in values.get("images", ())],
        )


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
