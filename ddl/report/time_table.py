"""The table of the seconds that runs spent in each kind of work."""

from collections.abc import Sequence

from ddl.report.overview import duration
from ddl.run.timing.goodput import NAMES, Life


def time_rows(lives: Sequence[Life]) -> list[tuple[str, list[str]]]:
    """Returns the rows: a name, and a text for each run that is empty if there is nothing.

    Args:
      lives: The time of each run.
    """
    totals = [sum(life.seconds.values()) for life in lives]
    found = [
        ("all", [duration(total) for total in totals]),
        (
            "goodput",
            [
                f"{life.goodput:.1%}" if total else ""
                for life, total in zip(lives, totals, strict=True)
            ],
        ),
    ]
    for kind, name in NAMES.items():
        cells = [
            f"{duration(seconds)} ({seconds / total:.1%})"
            if (seconds := life.seconds.get(kind, 0.0)) > 0
            else ""
            for life, total in zip(lives, totals, strict=True)
        ]
        if any(cells):
            found.append((name, cells))
    found.append(("starts", [f"{life.starts:,}" for life in lives]))
    if any(life.repeated for life in lives):
        found.append(("updates made again", [f"{life.repeated:,}" for life in lives]))
    return found
