"""The HTML page of a report: one file that needs no network."""

import base64
import datetime
import hashlib
import html
import itertools
from collections.abc import Sequence
from pathlib import Path

import ddl
from ddl.errors import ConfigError, installing
from ddl.report.bindings import differences
from ddl.report.charts import (
    MOST_CHARTS,
    RANGES,
    Chart,
    colors,
    data,
    is_thinned,
    one_line,
)
from ddl.report.finals import Row, number
from ddl.report.overview import facts_of
from ddl.report.profiles import profile_rows
from ddl.report.record import Record
from ddl.report.sections.histograms import section as histogram_section
from ddl.report.sections.markup import NONE, breakable, dotted, escaped, table
from ddl.report.time_table import time_rows

_FOLDER = Path(__file__).parent
_TIME_LINK = '<a href="#time">Time</a>'
_HISTOGRAM_LINK = '<a href="#histograms">Histograms</a>'


def plotly() -> str:
    """Returns the JavaScript of plotly.

    Raises:
      ConfigError: If plotly is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"A report needs plotly, which cannot be imported ({error}). {installing('report')}"
        ) from error
    return str(get_plotlyjs())


def page(
    records: Sequence[Record],
    names: Sequence[str],
    drawn: Sequence[Chart],
    left_out: Sequence[str],
    finals: Sequence[Row],
    library: str,
    parted: Sequence[str] = (),
) -> str:
    """Returns the page.

    Args:
      records: The runs.
      names: Names that tell the runs apart, as they are shown.
      drawn: The charts.
      left_out: Names of figures that have no chart.
      finals: The last values.
      library: The JavaScript of plotly.
      parted: Where runs parted, a line each.
    """
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    scripts = [library, (_FOLDER / "page.js").read_text()] if drawn else []
    # Nothing but these scripts may run, and nothing may be loaded, whatever the names contain.
    allowed = " ".join(f"'sha256-{_hash(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    shown = _names(records, names)
    histograms = histogram_section(records, shown)
    body = [
        f"<header><h1>{escaped(title)}</h1>",
        f'<p class="soft">Written by ddl {ddl.__version__} on {now}.</p>',
        '<nav><a href="#runs">Runs</a><a href="#finals">Last values</a>'
        f"{_TIME_LINK if any(record.life for record in records) else ''}"
        f'<a href="#curves">Curves</a>{_HISTOGRAM_LINK if histograms else ""}'
        '<a href="#configs">Configs</a></nav></header>',
        *_runs(records, shown, parted),
        *_finals(records, shown, finals),
        *_times(records, shown),
        *_profiles(records, shown),
        *_curves(records, shown, drawn, left_out),
        *histograms,
        *_configs(records, shown),
    ]
    if drawn:
        points = data(drawn, names, records)
        body.append(f'<script type="application/json" id="data">{points}</script>')
    body += [f"<script>{script}</script>" for script in scripts]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title)} · ddl report</title>",
            f"<style>\n{(_FOLDER / 'page.css').read_text()}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _names(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Returns the names of the runs as HTML, with the colours of their curves."""
    return [
        f'<span class="run" style="background:var(--run-{color % 8})"></span>{breakable(name)}'
        if record.curves
        else breakable(name)
        for record, name, color in zip(records, names, colors(records), strict=True)
    ]


def _runs(records: Sequence[Record], names: Sequence[str], parted: Sequence[str]) -> list[str]:
    facts = [facts_of(record) for record in records]
    columns = list(dict.fromkeys(itertools.chain.from_iterable(facts)))
    heads = [f"<th>{escaped(head)}</th>" for head in ("run", "state", *columns, "directory")]
    rows = []
    for place, (record, of_run) in enumerate(zip(records, facts, strict=True)):
        cells = [
            f'<td class="fact">{escaped(of_run[name]) if name in of_run else NONE}</td>'
            for name in columns
        ]
        rows.append(
            f'<tr><th scope="row" class="breaks">{names[place]}</th>'
            f'<td class="state">{escaped(record.state)}</td>'
            f'{"".join(cells)}<td class="path breaks">{breakable(str(record.path))}</td></tr>'
        )
    found = ['<section id="runs"><h2>Runs</h2>', table(heads, rows)]
    found += [f"<p>{escaped(line)}</p>" for line in parted]
    if any(record.warnings for record in records):
        found.append('<div class="warnings"><h3>Restarts and warnings</h3>')
        for place, record in enumerate(records):
            if record.warnings:
                items = "".join(f"<li>{escaped(text)}</li>" for text in record.warnings)
                found.append(f"<p>{names[place]}</p><ul>{items}</ul>")
        found.append("</div>")
    return [*found, "</section>"]


def _finals(records: Sequence[Record], names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ['<section id="finals"><h2>Last values</h2><p>No run has a metric.</p></section>']
    note = "The value at the last step that has it"
    if any(final.best for row in rows for final in row.finals):
        note += "; below it, the best of the run and its step, where ddl knows which is better"
    if any(final.wins for row in rows for final in row.finals):
        note += ". The best of the runs is <b>bold</b>"
    steps = {record.step for record in records if record.step is not None}
    if len(steps) > 1:
        note += ". <b>The runs are not equally long</b>: these values are of different steps"
    measured = [place for place, record in enumerate(records) if record.curves]
    heads = ["<th>figure</th>"]
    heads += [f'<th class="number breaks">{names[place]}</th>' for place in measured]
    lines, split = [], None
    for row in rows:
        if row.split != split:
            split = row.split
            head = (
                f'<th scope="rowgroup" colspan="{len(measured) + 1}"><b>{escaped(split)}</b></th>'
            )
            lines.append(f"<tr>{head}</tr>")
        cells = []
        for record, final in ((records[place], row.finals[place]) for place in measured):
            if final.last is None:
                cells.append(f'<td class="number">{NONE}</td>')
                continue
            text = number(final.last.value)
            text = f"<b>{text}</b>" if final.wins else text
            if final.last.step != record.step:
                text += f" <small>at step {final.last.step:,.0f}</small>"
            if final.best is not None and final.best != final.last:
                text += f"<small>best {number(final.best.value)} at {final.best.step:,.0f}</small>"
            cells.append(f'<td class="number">{text}</td>')
        arrow = {"max": " <small>↑</small>", "min": " <small>↓</small>", None: ""}[row.direction]
        head = f'<th scope="row" class="breaks">{dotted(row.name)}{arrow}</th>'
        lines.append(f"<tr>{head}{''.join(cells)}</tr>")
    return [
        f'<section id="finals"><h2>Last values</h2><p class="soft">{note}.</p>',
        table(heads, lines),
        "</section>",
    ]


def _times(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    counted = [place for place, record in enumerate(records) if record.life is not None]
    if not counted:
        return []
    note = (
        "From the first start on. Goodput is the share of updates, without repeated ones and "
        "without waiting for input."
    )
    heads = ["<th>kind of work</th>"]
    heads += [f'<th class="number breaks">{names[place]}</th>' for place in counted]
    lines = _lines(time_rows([life for record in records if (life := record.life)]))
    return [
        f'<section id="time"><h2>Time of the whole life</h2><p class="soft">{note}</p>',
        table(heads, lines),
        "</section>",
    ]


def _profiles(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    given = [
        (f"{names[place]}<small>{escaped(which)}</small>", times)
        for place, record in enumerate(records)
        for which, times in record.profiles
    ]
    if not given:
        return []
    note = (
        "Times of operations, or on GPUs of kernels, in an update. Those that run at the same time "
        "are added up, such as those of several replicas."
    )
    heads = ["<th>phase</th>", *(f'<th class="number breaks">{head}</th>' for head, _ in given)]
    return [
        f'<section id="profiles"><h2>Profiles</h2><p class="soft">{note}</p>',
        table(heads, _lines(profile_rows([times for _, times in given]))),
        "</section>",
    ]


def _lines(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Returns rows of names and texts as rows of a table."""
    found = []
    for name, cells in rows:
        texts = "".join(
            f'<td class="number">{escaped(cell) if cell else NONE}</td>' for cell in cells
        )
        found.append(f'<tr><th scope="row" class="breaks">{escaped(name)}</th>{texts}</tr>')
    return found


def _curves(
    records: Sequence[Record], names: Sequence[str], drawn: Sequence[Chart], left_out: Sequence[str]
) -> list[str]:
    found = ['<section id="curves"><h2>Curves</h2>']
    if not drawn:
        return [*found, "<p>There is nothing to draw.</p></section>"]
    note = (
        "Drag to zoom, double-click to zoom out, hover to read values. Evaluations are thick, "
        "training is thin."
    )
    if any(len(record.starts) > 1 for record in records):
        note += " A dashed vertical line is the first log after a restart."
    if is_thinned(drawn):
        note += (
            f" Curves with more than {4 * RANGES:,} points show the first, last, smallest and "
            f"largest of each of {RANGES:,} ranges of steps."
        )
    boxes = "".join(
        f'<label><input type="checkbox" data-run="{place}" checked> {names[place]}</label>'
        for place, record in enumerate(records)
        if record.curves
    )
    found += [
        f'<p class="soft">{note}</p>',
        '<noscript><p class="warnings">The curves need JavaScript. ddl.report also writes PNG '
        "files: --pictures.</p></noscript>",
        f'<div class="controls"><span class="runs">{boxes}</span>',
        '<span><label><input type="radio" name="x" value="step" checked> steps</label> '
        '<label><input type="radio" name="x" value="epoch"> epochs</label></span>',
        '<label><input type="checkbox" id="log"> logarithmic</label></div>',
    ]
    found += [
        '<div class="charts">',
        *(
            f"<figure><figcaption>{escaped(chart.name)}"
            f"{f'<small>{chart.better}</small>' if chart.better else ''}</figcaption>"
            f'<div class="chart" data-chart="{place}"></div></figure>'
            for place, chart in enumerate(drawn)
        ),
        "</div>",
    ]
    if left_out:
        some = ", ".join(escaped(name) for name in left_out[:40])
        found.append(
            f"<p>Not drawn, since a page has at most {MOST_CHARTS} charts: "
            f"{len(left_out):,} figures ({some}{', …' if len(left_out) > 40 else ''}). Choose "
            "with --figures.</p>"
        )
    return [*found, "</section>"]


def _configs(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    found = ['<section id="configs"><h2>Configs</h2>']
    given = [place for place, record in enumerate(records) if record.config is not None]
    if not given:
        return [*found, "<p>No run has a config that can be read.</p></section>"]
    if len(given) > 1:
        found.append("<h3>What differs</h3>")
        if differing := differences([records[place].bindings for place in given]):
            heads = ["<th>binding</th>", *(f"<th>{names[place]}</th>" for place in given)]
            rows = [
                f'<tr><th scope="row" class="path breaks">{dotted(each.name)}</th>'
                + "".join(
                    f'<td class="value">{NONE if text is None else escaped(text)}</td>'
                    for text in each.values
                )
                + "</tr>"
                for each in differing
            ]
            found += [table(heads, rows), '<p class="soft">– means not bound.</p>']
        else:
            found.append("<p>Nothing: the configs bind the same values.</p>")
        if len({records[place].config_file for place in given}) > 1:
            found.append(
                "<p>Some runs have only a config.gin, which has no defaults: they differ in all "
                "bindings that have their default value.</p>"
            )
        found.append("<h3>Whole configs</h3>")
    for place in given:
        record = records[place]
        text = "\n".join(map(one_line, (record.config or "").splitlines()))
        found.append(
            f"<details{' open' if len(given) == 1 else ''}><summary>{names[place]} "
            f"<small>{record.config_file}</small></summary><pre>{html.escape(text)}</pre></details>"
        )
    return [*found, "</section>"]
