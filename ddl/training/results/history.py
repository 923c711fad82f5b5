"""The figures of a training, by step."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from ddl.errors import ConfigError

_SPLITS = ("train", "eval")


class History(Sequence[dict[str, Any]]):
    """Figures of training and evaluation, one row for each step and split, in order.

    A row is a dict: "step", "epoch", "split" (`train` or `eval`), "loss" and further figures. A
    figure that a row lacks but others of its split have is NaN. `pandas.DataFrame(history)` has a
    line for each row.

    It is also a writer of metrics (`ddl.run.writers.Writer`).
    """

    def __init__(self) -> None:
        """Makes an empty history."""
        self._splits = {split: _Columns() for split in _SPLITS}
        # Number of the split of each row. A loop of many calls of `train(1)` makes many rows, so
        # the figures are kept in arrays.
        self._order = array("b")

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns a row, or a list of rows for a slice.

        Raises:
          IndexError: If there is no such row.
          ConfigError: If the index is a text, such as the name of a figure.
        """
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if isinstance(index, str):
            raise ConfigError(
                f"A history has rows, got the name {index!r}. For a figure's values by step write "
                f"trainer.history.figures('train')[{index!r}], or 'eval'."
            )
        number = range(len(self))[index]
        split = _SPLITS[self._order[number]]
        return self._splits[split].row(self._order[:number].count(self._order[number]), split)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the rows in order."""
        number = [0] * len(_SPLITS)
        for which in self._order:
            split = _SPLITS[which]
            yield self._splits[split].row(number[which], split)
            number[which] += 1

    def __repr__(self) -> str:
        """Returns the number of rows, and the last row of each split."""
        last = [own.row(len(own) - 1, split) for split, own in self._splits.items() if len(own)]
        return f"<History of {len(self)} rows; last: {last}>"

    def figures(self, split: str = "train") -> dict[str, np.ndarray]:
        """Returns the figures of a split by name: "step" int64 [n], others float64 [n].

        Args:
          split: `train` or `eval`.

        Raises:
          ConfigError: If the split has another name.
        """
        if split not in _SPLITS:
            raise ConfigError(f"split must be 'train' or 'eval', got {split!r:.60}.")
        return self._splits[split].figures()

    def plot(self, *names: str) -> Any:
        """Plots figures over the steps, training and evaluation on the same axes.

        Needs matplotlib: the extra `plots`.

        Args:
          *names: Names of figures; none plots those of the evaluations, or else of training.

        Returns:
          A list of matplotlib's axes, one for each figure.

        Raises:
          ConfigError: If there are no figures, a figure is unknown, or matplotlib is missing.
        """
        from ddl.training.results.plotting import plot

        return plot({split: self.figures(split) for split in _SPLITS}, names)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Adds figures; those of the split's last row if it has the same step, else a new row.

        Args:
          step: Updates made.
          epoch: Passes over the training data.
          split: `train` or `eval`.
          values: Figures by name.
        """
        if self._splits[split].add(step, epoch, values):
            self._order.append(_SPLITS.index(split))

    def drop_after(self, last_step: int) -> None:
        """Drops the rows of steps after `last_step`, which training repeats."""
        if all(own.last_step <= last_step for own in self._splits.values()):
            return
        rows = [row for row in self if row["step"] <= last_step]
        self.__init__()  # type: ignore[misc]
        self.extend(rows)

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


class _Columns:
    """The figures of a split."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {"epoch": array("d")}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step(self) -> int:
        return self._steps[-1] if self._steps else -1

    def add(self, step: int, epoch: float, values: Mapping[str, float]) -> bool:
        """Returns whether a new row was added."""
        is_new = self.last_step != step
        if is_new:
            self._steps.append(step)
            for column in self._columns.values():
                column.append(math.nan)
        for name, value in {"epoch": epoch, **values}.items():
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * len(self)
            self._columns[name][-1] = value
        return is_new

    def row(self, number: int, split: str) -> dict[str, Any]:
        first = {"step": self._steps[number], "epoch": self._columns["epoch"][number]}
        rest = {name: column[number] for name, column in self._columns.items() if name != "epoch"}
        return {**first, "split": split, **rest}

    def figures(self) -> dict[str, np.ndarray]:
        steps = np.array(self._steps, np.int64)
        return {"step": steps, **{name: np.array(c) for name, c in self._columns.items()}}
