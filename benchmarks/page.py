"""The page and pictures of the results: python -m benchmarks.page writes README.md.

Both are built only from the JSON files in the results folder. For benchmarks/results the page is
benchmarks/README.md; for any other folder it is README.md in that folder.
"""

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import BENCHMARKS, LONG, ON_GPU
from benchmarks.harness import RESULTS, Table, Target, markdown, targets_table


class Picture(NamedTuple):
    """A picture of a benchmark: some columns of its first table as bars, a group for each row."""

    y_label: str
    columns: tuple[str, ...]


PICTURES = {
    "loop_overhead": Picture(
        "ddl's speed / the others'",
        ("Keras fit", "Keras fit, tuned", "Orbit", "Keras fit, JAX"),
    ),
    "input": Picture("ddl's speed / tf.data's", ("speed / tf.data's",)),
    "weak_scaling": Picture("scaling of two workers", ("ddl", "TensorFlow")),
    "embeddings": Picture("ddl's speed / the others'", ("Keras fit", "Keras fit, tuned", "Orbit")),
    "gpu": Picture("ddl's speed / the others'", ("Keras fit", "Orbit")),
    "gpu_counts": Picture("ddl's operations / the bare loop's", ("ratio",)),
}
"""One picture each for loop, input, scaling, embeddings and GPU, by benchmark."""

INTRODUCTION = f"""# Benchmarks

<!-- Written by `python -m benchmarks.page`. -->

`make bench`, or `python -m benchmarks`, runs all but {", ".join((*LONG, *ON_GPU))} and writes this
page; `python -m benchmarks NAME` runs one, and `python -m benchmarks.page` rewrites the page and
its pictures from the stored results. Figures are medians, with the lowest and the highest in
brackets. Each contender has several fresh processes, which compute by turns. A ratio compares a
process of ddl with the process of the other that ran beside it. A target is open if its bracket
holds the limit. Compare ratios, because machines differ. Each result names its date and commit."""


def page(results: Path, path: Path) -> str:
    """Returns the text of the page at `path`, from all JSON files in the folder `results`."""
    found = [json.loads(file.read_text()) for file in results.glob("*.json")]
    places = {name: place for place, name in enumerate((*BENCHMARKS, *LONG, *ON_GPU))}
    found.sort(key=lambda result: (places.get(result["name"], len(places)), result["name"]))
    rows: list[Any] = [
        [f"[{result['name']}](#{_anchor(result['title'])})", *row]
        for result in found
        for row in targets_table([Target(**target) for target in result["targets"]]).rows
    ]
    columns = ["benchmark", "figure", "target", "measured", ""]
    parts = [INTRODUCTION, "## Targets", markdown(Table("", columns, rows))]
    for result in found:
        parts += _section(result, results, path)
    return "\n\n".join(parts) + "\n"


def _section(result: dict[str, Any], results: Path, path: Path) -> list[str]:
    parts = [
        f"## {result['title']}",
        result["text"],
        f"`{result['command']}`, {result['date']}, {result['minutes']:.1f} minutes, at commit "
        f"{result['commit'] or 'unknown'}, on {result['machine']}; {result['versions']}.",
    ]
    if result["quick"]:
        parts.append("**A quick run only checks that the benchmark works.**")
    for table in result["tables"]:
        parts += [f"**{table['title']}**"] if table["title"] else []
        parts.append(markdown(Table(**table)))
    if result["name"] in PICTURES:
        picture = os.path.relpath(results / f"{result['name']}.png", path.parent)
        parts.append(f"![{result['title']}]({picture})")
    return [*parts, *result["notes"]]


def _anchor(title: str) -> str:
    """Returns the link anchor of a heading."""
    kept = (c for c in title.lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the picture of a result."""
    from matplotlib.figure import Figure

    picture, table = PICTURES[result["name"]], result["tables"][0]
    places = {column: list(table["columns"]).index(column) for column in picture.columns}
    rows = [x for x in table["rows"] if not all(isinstance(x[p], str) for p in places.values())]
    names = [textwrap.fill(str(row[0]), 14, break_long_words=False) for row in rows]
    figure = Figure(figsize=(max(6.0, 0.9 * len(names)), 3.8), layout="constrained")
    axes, width = figure.add_subplot(), 0.8 / len(picture.columns)
    for number, column in enumerate(places):
        cells = [row[places[column]] for row in rows]
        drawn = [(place, cell) for place, cell in enumerate(cells) if not isinstance(cell, str)]
        spreads = np.array([c if isinstance(c, list) else [c] * 3 for _, c in drawn]).reshape(-1, 3)
        middle, low, high = spreads.T
        at = [place + number * width for place, _ in drawn]
        axes.bar(at, middle, width, yerr=[middle - low, high - middle], capsize=2, label=column)
    axes.set_ylabel(picture.y_label)
    shift = (len(picture.columns) - 1) / 2 * width
    axes.set_xticks([place + shift for place in range(len(names))], names, fontsize=7)
    axes.axhline(1.0, color="grey", lw=0.8, ls="--")
    if len(picture.columns) > 1:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def page_path(results: Path) -> Path:
    """Returns the path of a results folder's page."""
    return (RESULTS.parent if results.resolve() == RESULTS else results) / "README.md"


def write(results: Path) -> Path:
    """Writes the page and its pictures, for which it needs matplotlib; returns the page's path."""
    path = page_path(results)
    path.write_text(page(results, path))
    for name in PICTURES:
        file = results / f"{name}.json"
        if file.exists():
            draw(json.loads(file.read_text()), file.with_suffix(".png"))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder [%(default)s]")
    print(f"Wrote {write(parser.parse_args().results)}.")
