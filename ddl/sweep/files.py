"""The files of a sweep's run: how far it has come, as they show. Imports neither NumPy nor gin.

A run is finished if a checkpoint of its last step is on disk: logs and evaluations of a step are
written before its checkpoint. A run that ended in another way gets the file `ended.json` from the
sweep, with the exit status of its process.
"""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Literal

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ModelDirectoryError, TrainingDiverged
from ddl.files import open_itself, unwritable
from ddl.run.metric_lines import parsed

Split = Literal["eval", "train"]

ENDED = "ended.json"
_CHECKPOINT = re.compile(r"step-(\d+)\.index")
_TOTAL = re.compile(r"^TOTAL_STEPS = (\d+)$", re.MULTILINE)


@dataclasses.dataclass
class Progress:
    """How far a run has come.

    Attributes:
      step: The larger of the last step with metrics and that of the newest checkpoint; 0 if none.
      saved: Step of the newest checkpoint, from which the run resumes; None if there is none.
      total: Steps of the whole run; None if unknown.
      finished: Whether the run has ended as planned, or ended itself early.
      diverged: Whether it diverged.
      failed: Whether the sweep has given it up until its next start.
      values: The metric by step, in ascending order; NaN where it is not finite.
      names: Names of all figures of the split.
    """

    step: int = 0
    saved: int | None = None
    total: int | None = None
    finished: bool = False
    diverged: bool = False
    failed: bool = False
    values: dict[int, float] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train, at least in this start of the sweep."""
        return self.finished or self.diverged or self.failed

    @property
    def last(self) -> float | None:
        """The last value of the metric; None if there is none."""
        return self.values[max(self.values)] if self.values else None

    def at(self, step: int) -> float | None:
        """Returns the metric as it was at a step: its last value until then.

        Args:
          step: The step.

        Returns:
          None if the run has not reached the step; NaN if it will not, or has no value until then.
        """
        if max(self.values, default=-1) < step and not self.finished:
            return math.nan if self.over else None
        before = [one for one in self.values if one <= step]
        return self.values[max(before)] if before else math.nan


def progress(folder: Path, metric: str, split: Split) -> Progress:
    """Reads how far a run has come. A file that is missing or damaged counts as nothing done.

    Args:
      folder: The directory of the run; it need not exist, and a run may be training there.
      metric: Name of the metric.
      split: Split of the metric.
    """
    found = Progress()
    found.values, found.names, logged = _metrics(folder / "metrics.jsonl", metric, split)
    saved = [int(name[1]) for name in map(_CHECKPOINT.fullmatch, _names(folder)) if name]
    total = _TOTAL.search(_text(folder / "operative_config.gin"))
    status = _status(folder / ENDED)
    found.saved = max(saved, default=None)
    found.step = max(logged, *saved, 0)
    found.total = int(total[1]) if total else None
    found.diverged = status == TrainingDiverged.exit_status
    reached = found.total is not None and max(saved, default=-1) >= found.total
    found.finished = reached or (status == 0 and bool(saved))
    return found


def write_status(folder: Path, status: int) -> None:
    """Writes the exit status of a run that ended for good.

    Raises:
      ModelDirectoryError: If it cannot be written.
    """
    path = folder / ENDED
    try:
        write_atomically(path, json.dumps({"exit_status": status}) + "\n")
    except OSError as error:
        raise ModelDirectoryError(unwritable(path, error)) from error


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder / "checkpoints")
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _status(path: Path) -> int | None:
    try:
        status = json.loads(_text(path))["exit_status"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return status if isinstance(status, int) else None


def _metrics(path: Path, metric: str, split: str) -> tuple[dict[int, float], tuple[str, ...], int]:
    """Returns the metric by step, all names, and the last step of any split."""
    values: dict[int, float] = {}
    names: dict[str, None] = {}
    last = 0
    try:
        file = open(path, "rb", opener=open_itself)  # noqa: SIM115
    except OSError:
        return values, (), last
    with file:
        for line in file:
            row = parsed(line) if line.endswith(b"\n") else None
            if row is None:
                continue
            step = int(row["step"])
            last = max(last, step)
            if row.get("split") != split:
                continue
            names.update(dict.fromkeys(row))
            if metric in row:
                value = row[metric]
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                values[step] = float(value) if is_number else math.nan
    own = ("step", "epoch", "split")
    return dict(sorted(values.items())), tuple(n for n in names if n not in own), last
