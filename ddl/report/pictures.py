"""The charts of a report as PNG files, with matplotlib."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ConfigError, installing
from ddl.report.charts import RANGES, Chart, one_line

# As in page.css, on white.
_COLORS = (
    *("#0072b2", "#d55e00", "#007d5c", "#a3478a"),
    *("#8a6d00", "#332288", "#2f8fc9", "#6b6b6b"),
)
_MARKERS = "osD^PX*h"


def figure_class() -> Any:
    """Returns matplotlib's class of figures, which needs no screen.

    Raises:
      ConfigError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--pictures needs matplotlib, which cannot be imported ({error}). "
            f"{installing('report')}"
        ) from error
    return Figure


def write_pictures(
    drawn: Sequence[Chart], names: Sequence[str], colors: Sequence[int], folder: Path
) -> list[Path]:
    """Writes a PNG file for each chart; replaces those of an earlier report.

    Args:
      drawn: The charts.
      names: Names of the runs, as they are shown.
      colors: The number of each run's colour.
      folder: Where to write; created if missing.

    Returns:
      The files, named after the figures, such as `loss.png`.

    Raises:
      ConfigError: If matplotlib is missing, or a file cannot be written.
    """
    figure_of = figure_class()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in drawn:
            figure = figure_of(figsize=(7, 4), layout="constrained")
            _draw(chart, names, colors, figure)
            name = re.sub(r"[^\w.-]+", "_", chart.name, flags=re.ASCII).strip("._")[:80] or "figure"
            path, number = folder / f"{name}.png", 1
            while path in written:
                number += 1
                path = folder / f"{name}-{number}.png"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing")  # such as Japanese letters
                picture = io.BytesIO()
                figure.savefig(picture, dpi=150, format="png")
            write_atomically(path, picture.getvalue())  # follows no link
            written.append(path)
    except OSError as error:
        raise ConfigError(
            f"--pictures={folder} cannot be written: {error.strerror or error}. Pass another "
            "folder, or correct its permissions."
        ) from error
    return written


def _draw(chart: Chart, names: Sequence[str], colors: Sequence[int], figure: Any) -> None:
    axes = figure.subplots()
    for run, split, curve in chart.curves:
        rows = curve.rows(RANGES)
        # matplotlib cannot scale an axis to the largest floats.
        values = np.where(np.abs(rows[:, 2]) < 1e300, rows[:, 2], np.nan)
        known = np.pad(np.isfinite(values), 1)
        # A point between two gaps has no line.
        marked = len(rows) <= 40 or (known[1:-1] & ~known[:-2] & ~known[2:]).any()
        trains, color = split == "train", colors[run]
        axes.plot(
            rows[:, 0],
            values,
            label=_plain(f"{names[run]} · {split}" if len(names) > 1 else split),
            color=_COLORS[color % 8],
            linestyle=":" if trains and len(rows) <= 200 else "-",
            linewidth=1.0 if trains else 1.8,
            alpha=0.7 if trains else 1,
            marker=_MARKERS[(color + color // 8) % 8] if marked else None,
            markersize=4,
        )
    axes.set_xlabel("step")
    axes.set_title(_plain(chart.name), loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.curves) <= 24:
        axes.legend(fontsize=8, frameon=False)


def _plain(text: str) -> str:
    """Returns a text that matplotlib shows as it is: one line, at most 60 characters, no TeX."""
    text = one_line(text)
    text = f"{text[:40]}…{text[-19:]}" if len(text) > 60 else text
    return text.replace("$", r"\$")
