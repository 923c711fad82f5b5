"""Reading of metrics.jsonl for a report: what cannot be read is counted, and never fatal."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddl.figures import DIGEST
from ddl.files import open_itself
from ddl.report.curves import Curve
from ddl.run.metric_lines import parsed

_LONGEST_LINE = 2**20
_MOST_FIGURES = 2000
_OWN_KEYS = ("step", "epoch", "split")


class Metrics:
    """The figures of a run by split and name.

    Attributes:
      curves: A curve for each split and figure, in the order of the file.
      lines: Number of lines read.
      last_step: The largest step; -1 if there is no line.
      last_epoch: The epoch of that step; NaN if unknown.
      faults: A text for each kind of fault.
      digests: The digest at each step that has one.
    """

    def __init__(self, path: Path):
        """Reads a file; a missing one has no lines.

        Args:
          path: The file. Another process may append to it.

        Raises:
          OSError: If the file is there and cannot be read.
        """
        self.curves: dict[tuple[str, str], Curve] = {}
        self.lines = 0
        self.last_step, self.last_epoch = -1.0, math.nan
        self.faults: list[str] = []
        self.digests: dict[int, str] = {}
        self._invalid: list[int] = []  # the first ones
        self._invalid_count = 0
        self._not_numbers: dict[str, int] = {}
        self._too_many: set[str] = set()
        self._backwards: dict[str, int] = {}
        self._step_of: dict[str, float] = {}
        unfinished = False
        for number, line in enumerate(_lines(path), start=1):
            values = parsed(line) if line is not None else None
            if values is not None and isinstance(values.get("split", "train"), str):
                self._add(values)
            elif line is not None and not line.endswith(b"\n"):
                unfinished = True
            elif line is None or line.strip():
                self._invalid_count += 1
                self._invalid = [*self._invalid, number][:3]
        self._tell(path.name, unfinished)

    def _add(self, values: dict[str, Any]) -> None:
        step, split = float(values["step"]), values.get("split", "train")
        epoch = _number(values.get("epoch"))
        epoch = math.nan if epoch is None else epoch
        self.lines += 1
        if step < self._step_of.get(split, -1):
            self._backwards[split] = self._backwards.get(split, 0) + 1
        self._step_of[split] = step
        if step >= self.last_step:
            self.last_step, self.last_epoch = step, epoch
        for name, value in values.items():
            if name in _OWN_KEYS:
                continue
            if name == DIGEST and isinstance(value, str):
                self.digests[int(step)] = value
                continue
            number = _number(value)
            if number is None:
                self._not_numbers[name] = self._not_numbers.get(name, 0) + 1
                if len(self._not_numbers) > _MOST_FIGURES:
                    self._not_numbers.popitem()
                continue
            curve = self.curves.get((split, name))
            if curve is None:
                if len(self.curves) >= _MOST_FIGURES:
                    if len(self._too_many) < _MOST_FIGURES:
                        self._too_many.add(name)
                    continue
                curve = self.curves[split, name] = Curve()
            curve.add(step, epoch, number)

    def _tell(self, file: str, unfinished: bool) -> None:
        """Describes the faults."""
        if self._invalid:
            some = ", ".join(map(str, self._invalid))
            more = ", …" if self._invalid_count > len(self._invalid) else ""
            self.faults.append(
                f"{_count(self._invalid_count, 'line')} of {file} cannot be read and "
                f"{'is' if self._invalid_count == 1 else 'are'} left out: number {some}{more}."
            )
        if unfinished:
            self.faults.append(
                f"The last line of {file} is incomplete and left out: the run was killed while "
                "writing it, or is writing now."
            )
        for split, times in self._backwards.items():
            self.faults.append(
                f"The steps of the {split} lines go back {_count(times, 'time')}. The curves are "
                "sorted by step; of several lines of a step the last one counts."
            )
        for name, times in list(self._not_numbers.items())[:10]:
            self.faults.append(f"{name} is no number in {_count(times, 'line')}.")
        if self._too_many:
            self.faults.append(
                f"{file} has more than {_MOST_FIGURES:,} figures. The report has the first ones."
            )
        for (split, name), curve in self.curves.items():
            curve.rows(1)  # counts the last points too
            if curve.not_finite:
                self.faults.append(
                    f"{name} ({split}) is not finite in {curve.not_finite:,} of "
                    f"{_count(curve.points, 'line')}, first at step {curve.first_not_finite:,.0f}."
                )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _number(value: object) -> float | None:
    """Returns a value as a float: NaN for null, infinity for what is too large; None for others."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yields each line with its newline; None for one that is too long to be a line of ddl."""
    try:
        file = open(path, "rb", opener=open_itself)  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(_LONGEST_LINE):
            if len(line) < _LONGEST_LINE:
                yield line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(_LONGEST_LINE)
            yield None
