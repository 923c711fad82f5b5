"""Names of runs, and what the first table of a report shows of each."""

import datetime
import math
from collections.abc import Mapping
from pathlib import Path

from ddl.report.record import Record


def labels(paths: list[Path]) -> list[str]:
    """Returns the shortest endings of paths that tell them apart, each at least one name.

    Args:
      paths: Different absolute paths.
    """
    found = []
    for path in paths:
        parts = path.parts
        others = [other.parts for other in paths if other != path]
        length = next(
            n
            for n in range(1, len(parts) + 1)
            if n == len(parts) or all(other[-n:] != parts[-n:] for other in others)
        )
        found.append("/".join(parts[-length:]).replace("//", "/"))
    return found


def facts_of(record: Record) -> Mapping[str, str]:
    """Returns what is known of a run beside its state and warnings, as texts by name."""
    metadata, found = record.metadata, {}
    if record.epoch is not None:
        found["epochs"] = f"{record.epoch:,.2f}"
    if record.checkpoint is not None:
        found["checkpoint"] = f"step {record.checkpoint:,}"
    if isinstance(seconds := metadata.get("seconds"), int | float) and 0 < seconds < 1e12:
        found["time in updates"] = duration(seconds)
    if record.life is not None and not math.isnan(record.life.goodput):
        found["goodput"] = f"{record.life.goodput:.1%}"
    if isinstance(replicas := metadata.get("replicas"), int):
        found["replicas"] = f"{replicas:,}"
    if record.written is not None:
        written = datetime.datetime.fromtimestamp(record.written)
        found["last written"] = written.strftime("%Y-%m-%d %H:%M")
    return found


def duration(seconds: float) -> str:
    """Returns a duration such as `1 h 05 min` or `3.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"
