"""The page and pictures of the results: python -m benchmarks.page writes README.md.

The page is built only from the JSON files in the results folder. For benchmarks/results it is
benchmarks/README.md; for any other folder it is README.md in that folder.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import BENCHMARKS, LONG, ON_GPU
from benchmarks.report import RESULTS, Bar, Cell, Images, Plot, Report, Spread, Table

_IMAGES_IN_A_ROW = 10


def text_of(cell: Cell) -> str:
    """Formats a cell: three significant digits, and the interval of a spread in brackets."""
    if isinstance(cell, Spread):
        level = ", level" if cell.is_level else ""
        return f"{text_of(cell.median)} ({text_of(cell.low)}–{text_of(cell.high)}){level}"
    if isinstance(cell, float):
        if cell == 0 or not math.isfinite(cell):
            return f"{cell:g}"
        decimals = 2 - math.floor(math.log10(abs(cell)))
        return f"{cell:,.{max(decimals, 0)}f}" if decimals < 7 else f"{cell:.0e}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def bars_table(bars: Sequence[Bar]) -> Table:
    """Builds a table with one row for each target."""
    signs = {"at least": "≥", "at most": "≤"}
    rows = [[bar.what, f"{signs[bar.kind]} {bar.limit:g}", bar.value, bar.verdict] for bar in bars]
    return Table("Targets", ["figure", "target", "measured", ""], rows)


def show(report: Report, title: str) -> None:
    """Prints a report."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.rule(title)
    bars = [bars_table(report.bars)] if report.bars else []
    for table in [*bars, *report.tables]:
        grid = RichTable(title=table.title or None, title_justify="left")
        for number, column in enumerate(table.columns):
            grid.add_column(column, justify="right" if number else "left")
        for row in table.rows:
            grid.add_row(*map(text_of, row))
        console.print(grid)
    for note in report.notes:
        console.print(note)


# ------------------------------------------------------------ the picture


def draw(plots: Sequence[Plot | Images], path: Path) -> None:
    """Writes a benchmark's picture, or reports that matplotlib is missing."""
    path.unlink(missing_ok=True)
    if not plots:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            "No picture was drawn: matplotlib is missing. Install it with pip install '.[plots]'.",
            file=sys.stderr,
        )
        return
    columns = min(2, len(plots))
    rows = -(-len(plots) // columns)
    width = max(5.5, *(_width_of_names(plot) for plot in plots if isinstance(plot, Plot)), 0)
    height = 3.6 if any(isinstance(plot, Plot) for plot in plots) else 2.0
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    for number, plot in enumerate(plots, start=1):
        draw_one = _draw_images if isinstance(plot, Images) else _draw_plot
        draw_one(figure.add_subplot(rows, columns, number), plot)
    figure.savefig(path, dpi=110)


def _names(plot: Plot) -> list[str]:
    """Returns the labels of the bars; empty for a plot of lines."""
    return [*dict.fromkeys(x for s in plot.series for x in s.x if isinstance(x, str))]


def _width_of_names(plot: Plot) -> float:
    """Returns the width of the labels side by side, in inches."""
    names = _names(plot)
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    return 0.075 * longest * len(names)


def _draw_plot(axes: Any, plot: Plot) -> None:
    axes.set_title(plot.title, fontsize=10)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    names = _names(plot)
    width = 0.8 / len(plot.series)
    for number, series in enumerate(plot.series):
        points = [y if isinstance(y, Spread) else Spread(y, y, y) for y in series.y]
        middle = np.array([point.median for point in points])
        error = [middle - [p.low for p in points], [p.high for p in points] - middle]
        if names:
            shift = (number - (len(plot.series) - 1) / 2) * width
            places = [names.index(str(x)) + shift for x in series.x]
            axes.bar(places, middle, width, yerr=error, capsize=2, label=series.name)
        else:
            axes.errorbar(series.x, middle, error, marker="o", ms=4, capsize=2, label=series.name)
    if names:
        axes.set_xticks(range(len(names)), names, fontsize=8)
    if plot.log_x:
        axes.set_xscale("log", base=2)
    if plot.log_y:
        axes.set_yscale("log")
    if plot.level is not None:
        axes.axhline(plot.level, color="grey", lw=0.8, ls="--")
    if len(plot.series) > 1:
        axes.legend(fontsize=8)


def _draw_images(axes: Any, images: Images) -> None:
    """Draws images ten in a row, a pixel apart."""
    axes.set_title(images.title, fontsize=10)
    axes.set_axis_off()
    side = math.isqrt(len(images.pixels[0]))
    values = np.array([[int(pixel, 16) for pixel in image] for image in images.pixels])
    empty = -len(values) % _IMAGES_IN_A_ROW
    values = np.pad(values, ((0, empty), (0, 0))).reshape(-1, _IMAGES_IN_A_ROW, side, side)
    values = np.pad(values, ((0, 0), (0, 0), (0, 1), (0, 1)))  # white
    axes.imshow(np.block([[*row] for row in values]), cmap="gray_r", vmin=0, vmax=15)


# ------------------------------------------------------------ the page


def page(results: Path, path: Path) -> str:
    """Returns the text of the page at `path`, from all JSON files in the folder `results`."""
    found = [json.loads(file.read_text()) for file in results.glob("*.json")]
    places = {name: place for place, name in enumerate((*BENCHMARKS, *LONG, *ON_GPU))}
    found.sort(key=lambda result: (places.get(result["name"], len(places)), result["name"]))
    lines = [
        "# Benchmarks",
        "<!-- Written by `python -m benchmarks`. -->",
        "`make bench`, or `python -m benchmarks`, runs all but the long ones "
        f"({', '.join(LONG)}) and those that need a GPU ({', '.join(ON_GPU)}), and writes this "
        "page; `python -m benchmarks NAME` runs one, and `python -m benchmarks.page` rewrites the "
        "page from the stored results. Figures are "
        "medians of interleaved repeats; ratios are computed within each round. The brackets hold "
        "the lowest and the highest median where a benchmark runs in several processes, and else "
        "the quartiles of the repeats. Two contenders are level if the bracket of their ratio "
        "holds 1; a target is open if its bracket holds the limit. Compare ratios, because "
        "machines differ.",
    ]
    bars = [
        [f"[{result['name']}](#{_anchor(result['title'])})", *row]
        for result in found
        for row in bars_table(Report.from_json(result).bars).rows
    ]
    if bars:
        columns = ["benchmark", "figure", "target", "measured", ""]
        lines += ["## Targets", _markdown(columns, bars)]
    newest = max(found, key=lambda result: result["date"], default={}).get("code")
    for result in found:
        lines += _section(result, results, path, newest)
    return "\n\n".join(lines) + "\n"


def _section(
    result: Mapping[str, Any], results: Path, path: Path, newest_code: str | None
) -> list[str]:
    report, place = Report.from_json(result), result["machine"]
    gpus = "" if place["gpus"] == "none" else f", {place['gpus']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    versions += f"; ddl's code has the digest {result['code']}" if "code" in result else ""
    lines = [
        f"## {result['title']}",
        result["text"],
        f"`{result['command']}`, {result['date']}, {result['seconds'] / 60:.1f} minutes, on "
        f"{place['cores']} cores of {place['processor']}, {place['memory']:g} GiB{gpus}, "
        f"{place['system']}; {versions}.",
    ]
    if result.get("code") != newest_code:
        lines.append("Stale: measured with other code of ddl than the newest results on this page.")
    if not result.get("is_whole", True):
        lines.append("Stopped before its end: the figures are those of the cases that were done.")
    if result["quick"]:
        lines.append(
            "**A quick run only checks that the benchmark works; its figures mean nothing.**"
        )
    bars = [bars_table(report.bars)] if report.bars else []
    for table in [*bars, *report.tables]:
        lines += [f"**{table.title}**"] if table.title else []
        lines.append(_markdown(table.columns, table.rows))
    if (picture := results / f"{result['name']}.png").exists():
        lines.append(f"![{result['title']}]({os.path.relpath(picture, path.parent)})")
    return [*lines, *report.notes]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(text_of, line)) + " |" for line in lines)


def _anchor(title: str) -> str:
    """Returns the link anchor of a heading."""
    kept = (c for c in title.lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def page_path(results: Path) -> Path:
    """Returns the path of a results folder's page."""
    return (RESULTS.parent if results.resolve() == RESULTS else results) / "README.md"


def write_page(results: Path) -> Path:
    """Writes the page and returns its path."""
    path = page_path(results)
    path.write_text(page(results, path))
    return path


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page", description="Writes the page from the stored results."
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    print(f"Wrote {write_page(parser.parse_args().results)}.")


if __name__ == "__main__":
    main()
