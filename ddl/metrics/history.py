"""The figures of a training, by step, and how they are shown."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ddl.figures import EXAMPLES_PER_SECOND, LOSS_SCALE, SKIPPED_UPDATES


class History(list[dict[str, Any]]):
    """Figures of training and evaluation, one row for each step and split, in order.

    A row is a dict: "step", "epoch", "split" (`train` or `eval`), "loss" and further figures.
    `pandas.DataFrame(history)` has a line for each row.
    """

    def __repr__(self) -> str:
        """Returns the number of rows, and the last row."""
        return f"<History of {len(self)} rows; last: {self[-1:]}>"

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Adds figures; those of the split's last row if it has the same step, else a new row.

        Args:
          step: Updates made.
          epoch: Passes over the training data.
          split: `train` or `eval`.
          values: Figures by name.
        """
        row = next((row for row in reversed(self) if row["split"] == split), None)
        if row is None or row["step"] != step:
            row = {"step": step, "epoch": epoch, "split": split}
            self.append(row)
        row.update(values)

    def drop_after(self, last_step: int) -> None:
        """Drops the rows of steps after `last_step`, which training repeats."""
        self[:] = [row for row in self if row["step"] <= last_step]

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows with "step", "epoch" and "split"; a figure of None is NaN.

        Leaves out figures of the same or a later step that are there: another command, such as an
        evaluation of an earlier checkpoint, has appended them.
        """
        for row in rows:
            step, split = int(row["step"]), row["split"]
            last = next((one for one in reversed(self) if one["split"] == split), {"step": -1})
            known = {"step", "epoch", "split", *(last if last["step"] == step else ())}
            own = {name: value for name, value in row.items() if name not in known}
            figures = {k: math.nan if v is None else float(v) for k, v in own.items()}
            if step >= last["step"]:
                self.write(step, float(row["epoch"]), split, figures)


def format_figures(figures: Mapping[str, float]) -> str:
    """Formats metrics, loss first: 'loss 0.0312 · accuracy 0.9910 · 12,345 examples/s'."""
    names = dict.fromkeys(["loss", "accuracy", *figures])
    return " · ".join(_formatted(name, figures[name]) for name in names if name in figures)


def _formatted(name: str, value: float) -> str:
    if name == EXAMPLES_PER_SECOND:
        return f"{value:,.0f} examples/s"
    if name in (LOSS_SCALE, SKIPPED_UPDATES):
        return f"{name} {value:,.0f}"
    return f"{name} {value:.4f}" if name.endswith("accuracy") else f"{name} {value:.4g}"
