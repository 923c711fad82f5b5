"""The figures of a training, by step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ddl.errors import ConfigError

_SPLITS = ("train", "eval")


class History(Sequence[dict[str, Any]]):
    """Figures of training and evaluation, one row for each step and split, in order.

    A row is a dict: "step", "epoch", "split" (`train` or `eval`), "loss" and further figures.
    `pandas.DataFrame(history)` has a line for each row.

    It is also a writer of metrics (`ddl.run.writers.Writer`).
    """

    def __init__(self) -> None:
        """Makes an empty history."""
        self._rows: list[dict[str, Any]] = []
        self._last: dict[str, dict[str, Any]] = {}  # row of each split

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Returns a row, or a list of rows for a slice."""
        return self._rows[index]

    def __repr__(self) -> str:
        """Returns the number of rows, and the last row of each split."""
        return f"<History of {len(self)} rows; last: {list(self._last.values())}>"

    def figures(self, split: str = "train") -> dict[str, np.ndarray]:
        """Returns the figures of a split by name: "step" int64 [n], others float64 [n].

        Where a row lacks a figure of another row, its value is NaN.

        Args:
          split: `train` or `eval`.

        Raises:
          ConfigError: If the split has another name.
        """
        if split not in _SPLITS:
            raise ConfigError(f"split must be 'train' or 'eval', got {split!r:.60}.")
        rows = [row for row in self._rows if row["split"] == split]
        names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "split"))
        found = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
        return {"step": np.array([row["step"] for row in rows], np.int64), **found}

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Adds figures; those of the split's last row if it has the same step, else a new row.

        Args:
          step: Updates made.
          epoch: Passes over the training data.
          split: `train` or `eval`.
          values: Figures by name.
        """
        row = self._last.get(split)
        if row is None or row["step"] != step:
            row = {"step": step, "epoch": epoch, "split": split}
            self._last[split] = row
            self._rows.append(row)
        row.update(values)

    def drop_after(self, last_step: int) -> None:
        """Drops the rows of steps after `last_step`, which training repeats."""
        self._rows = [row for row in self._rows if row["step"] <= last_step]
        self._last = {row["split"]: row for row in self._rows}

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows with "step", "epoch" and "split"; a figure of None is NaN."""
        for row in rows:
            figures = {
                name: math.nan if value is None else float(value)
                for name, value in row.items()
                if name not in ("step", "epoch", "split")
            }
            self.write(int(row["step"]), float(row["epoch"]), row["split"], figures)

    def close(self) -> None:
        """Does nothing: no file is open."""
