"""The section of the histograms of layers: the last ones of each run."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddl.figures import HISTOGRAM_LIMITS, HISTOGRAMS_OF_LAYERS
from ddl.files import open_itself
from ddl.report.files_of_run import reason_of
from ddl.report.record import Record
from ddl.report.sections.markup import NONE, dotted, escaped, table

FILE = "histograms.jsonl"
"""File in a run's directory; see `ddl.run.writers.HistogramLinesWriter`."""

_LARGEST = 2**24  # bytes at the end of the file
_MOST_LAYERS = 60
_WIDTH, _HEIGHT = 210, 46
_LEFT = [2 * HISTOGRAM_LIMITS[0], *HISTOGRAM_LIMITS]  # the lower limit of each bin
_AROUND_0 = len(HISTOGRAM_LIMITS) // 2


class Bars(NamedTuple):
    """Counts of consecutive bins, from the bin of a number on."""

    first: int
    counts: list[int]


class Last(NamedTuple):
    """The last histograms of a run: their step, and bars by the names of layer and figure."""

    step: int
    of_layers: dict[str, dict[str, Bars]]


def last_of(run: Path) -> Last | None:
    """Reads the last whole line of a run's histograms; None if there is none.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If its end is not as ddl writes it.
    """
    try:
        with open(run / FILE, "rb", opener=open_itself) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LARGEST))
            lines = file.read(_LARGEST).split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    if not lines:
        return None
    values = json.loads(lines[-1])
    try:
        found = Last(int(values["step"]), {})
        for name, one in values.items():
            figure, _, layer = name.partition("/")
            if figure in HISTOGRAMS_OF_LAYERS:
                counts = [int(count) for count in one["counts"]]
                bars = Bars(_LEFT.index(one["from"]), counts)
                if min(counts) < 0 or bars.first + len(counts) > len(_LEFT):
                    raise ValueError
                found.of_layers.setdefault(layer, {})[figure] = bars
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError("its last line is not as ddl writes it") from error
    return found


def section(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Returns the section as HTML; nothing if no run has histograms.

    Args:
      records: The runs.
      names: Their names as HTML.
    """
    given: list[tuple[str, Last]] = []
    faults = []
    for record, name in zip(records, names, strict=True):
        try:
            last = last_of(record.path)
        except (OSError, ValueError, RecursionError) as error:
            faults.append(f"<p>{name}: {FILE} cannot be read: {escaped(reason_of(error))}.</p>")
            continue
        if last is not None:
            given.append((name, last))
    if not given and not faults:
        return []
    found = [
        '<section id="histograms"><h2>Histograms of layers</h2>',
        '<p class="soft">Entries by size, a bar for each power of two: negative ones '
        "on the left, those around 0 in grey, positive ones on the right. A column has one axis. "
        "The grey bar may be cut off.</p>",
        *faults,
    ]
    if given:
        found.append(table(*_heads_and_rows(given)))
    return [*found, "</section>"]


def _heads_and_rows(given: Sequence[tuple[str, Last]]) -> tuple[list[str], list[str]]:
    ranges = {figure: _range(given, figure) for figure in HISTOGRAMS_OF_LAYERS}
    heads = ["<th>layer</th>"]
    for figure, (low, high) in ranges.items():
        ends = f"{_power(_LEFT[low])} to {_power(-_LEFT[len(_LEFT) - 1 - high])}"
        heads.append(f'<th>{figure.removeprefix("layer_")} <small class="ends">{ends}</small></th>')
    rows = []
    for name, last in given:
        step = f"<small>step {last.step:,}</small>"
        rows.append(f'<tr><th scope="rowgroup" colspan="4"><b>{name}</b> {step}</th></tr>')
        for layer, figures in [*last.of_layers.items()][:_MOST_LAYERS]:
            cells = [
                f"<td>{_drawn(figures[one], *ranges[one]) if one in figures else NONE}</td>"
                for one in HISTOGRAMS_OF_LAYERS
            ]
            head = f'<th scope="row" class="breaks">{dotted(layer)}</th>'
            rows.append(f"<tr>{head}{''.join(cells)}</tr>")
        if (more := len(last.of_layers) - _MOST_LAYERS) > 0:
            rows.append(f'<tr><td colspan="4">{more:,} further layers are left out.</td></tr>')
    return heads, rows


def _range(given: Sequence[tuple[str, Last]], figure: str) -> tuple[int, int]:
    """Returns the first and the last bin of an axis that is symmetric about 0."""
    reach = 1
    for _, last in given:
        for figures in last.of_layers.values():
            if bars := figures.get(figure):
                ends = (bars.first, bars.first + len(bars.counts) - 1)
                reach = max(reach, *(abs(end - _AROUND_0) for end in ends))
    return _AROUND_0 - reach, _AROUND_0 + reach


def _drawn(bars: Bars, low: int, high: int) -> str:
    """Returns a histogram as SVG."""
    total = sum(bars.counts)
    at = {bars.first + place: count for place, count in enumerate(bars.counts) if count}
    highest = max((n for place, n in at.items() if place != _AROUND_0), default=total)
    width = _WIDTH / (high - low + 1)
    shapes = []
    for place, count in at.items():
        height = max(1.0, _HEIGHT * min(1.0, count / highest))
        kind = ' class="zero"' if place == _AROUND_0 else ""
        shapes.append(
            f'<rect{kind} x="{(place - low) * width:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{width * 0.9:.1f}" height="{height:.1f}">'
            f"<title>{_limits(place)}: {count:,} ({count / total:.1%})</title></rect>"
        )
    return (
        f'<svg class="histogram" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{total:,} entries">{"".join(shapes)}</svg>'
    )


def _limits(place: int) -> str:
    return f"{_LEFT[place]:.3g} to {-_LEFT[len(_LEFT) - 1 - place]:.3g}"


def _power(limit: float) -> str:
    """Returns a power of two with a sign as HTML."""
    exponent = str(round(math.log2(abs(limit)))).replace("-", "−")
    return f"{'−' if limit < 0 else ''}2<sup>{exponent}</sup>"
