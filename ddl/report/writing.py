"""A whole report: from directories to files."""

import os
from collections.abc import Sequence
from pathlib import Path

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ConfigError, check_no_text
from ddl.report.charts import MOST_CHARTS, charts, colors, one_line
from ddl.report.finals import rows
from ddl.report.overview import labels
from ddl.report.page import page, plotly
from ddl.report.parting import partings
from ddl.report.pictures import figure_class, write_pictures
from ddl.report.record import read
from ddl.run.timing.goodput import line as goodput_line


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    pictures: str | os.PathLike[str] | None = None,
    figures: Sequence[str] = (),
) -> list[str]:
    """Writes a page that shows and compares runs.

    A run directory that is empty, incomplete, damaged, unreadable or in use has a row in the page
    that says so.

    Args:
      runs: Directories of runs. One that is given twice is shown once.
      output: The HTML file; an earlier one is replaced.
      pictures: Folder for PNG files of the charts; None writes none.
      figures: Names of the figures to draw, in which `*` stands for any text; none draws all.

    Returns:
      Lines to print: the state and the warnings of each run, where they parted, and the files
      written.

    Raises:
      ConfigError: If a run is not a directory, no figure has a given name, a file cannot be
        written, or plotly or matplotlib is missing; or if `runs` or `figures` is a text.
    """
    check_no_text("write_report.runs", runs)
    check_no_text("write_report.figures", figures)
    folders = _folders(runs)
    output = Path(output)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--output must be a file whose name ends in .html, got {output}. Other files might be "
            "those of a run."
        )
    library = plotly()
    if pictures is not None:
        figure_class()
    records = [read(folder) for folder in folders]
    names = [one_line(label) for label in labels(folders)]
    found = charts(records, figures)
    for pattern in figures:
        if not charts(records, [pattern]):
            known = ", ".join(one_line(chart.name) for chart in charts(records)[:20]) or "none"
            raise ConfigError(
                f"--figures={one_line(pattern)}: no run has such a figure. The first ones that "
                f"they have: {known}. Pass a name, or a pattern with *."
            )
    drawn, left_out = found[:MOST_CHARTS], [chart.name for chart in found[MOST_CHARTS:]]
    parted = partings(records, names)
    text = page(records, names, drawn, left_out, rows(records), library, parted)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text)
    except OSError as error:
        raise ConfigError(
            f"--output={output} cannot be written: {error.strerror}. Pass another path, or correct "
            "its permissions."
        ) from error
    lines = []
    for name, record in zip(names, records, strict=True):
        lines.append(f"{name}: {record.state}")
        if record.life is not None:
            lines.append(f"  {goodput_line(record.life)}")
        lines += [f"  {times.line()}" for _, times in record.profiles]
        lines += [f"  {warning}" for warning in record.warnings]
    lines += [one_line(line) for line in parted]
    lines.append(f"Wrote {output} ({len(text.encode()) / 1e6:.1f} MB, {len(drawn)} charts).")
    if left_out:
        lines.append(f"{len(left_out)} further figures have no chart; choose with --figures.")
    if pictures is not None:
        written = write_pictures(drawn, names, colors(records), Path(pictures))
        lines.append(f"Wrote {len(written)} PNG files to {pictures}.")
    return lines


def _folders(runs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Returns the directories as different absolute paths.

    Raises:
      ConfigError: If there is none, or one is not a directory.
    """
    if not runs:
        raise ConfigError("A run is required, such as runs/digits. Pass one or more directories.")
    found: dict[Path, None] = {}
    for run in runs:
        try:
            folder = Path(run).resolve()
            is_folder = folder.is_dir()
        except (OSError, RuntimeError, ValueError):  # a circle of links; a null byte
            is_folder = False
        if not is_folder:
            raise ConfigError(
                f"Each run must be the directory of a run, got {one_line(str(run))}, which is "
                "none, or cannot be reached. Pass a --model_dir of ddl.main, such as runs/digits."
            )
        found[folder] = None
    return list(found)
