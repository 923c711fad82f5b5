"""A figure by step, in bounded memory: a long run writes millions of lines.

A curve keeps, for each of many equal ranges of steps, the first, the last, the smallest and the
largest value. Lines through these points look the same as lines through all points, if a range is
no wider than a pixel (M4: Jugel et al., "M4: A Visualization-Oriented Time Series Data
Aggregation", VLDB 2014).
"""

import math
from typing import NamedTuple

import numpy as np

from ddl.figures import Direction

# Points of a curve in memory, of which ranges keep up to five each.
_CAPACITY, _RANGES = 16384, 1024


class Point(NamedTuple):
    """A value at a step."""

    step: float
    value: float


class Curve:
    """One figure of one split of one run.

    Attributes:
      points: Number of points added.
      not_finite: Number of points whose value is NaN or infinite.
      first_not_finite: Step of the first of these in the file; NaN if there is none.
    """

    def __init__(self) -> None:
        """Makes an empty curve."""
        self.points = 0
        self.not_finite = 0
        self.first_not_finite = math.nan
        self._kept = np.empty((0, 3))
        self._new: list[tuple[float, float, float]] = []

    def add(self, step: float, epoch: float, value: float) -> None:
        """Adds a point.

        Args:
          step: Updates made.
          epoch: Passes over the training data; NaN if unknown.
          value: The figure; a value that is not finite makes a gap.
        """
        self._new.append((step, epoch, value))
        if len(self._new) >= _CAPACITY:
            self._flush()

    def _flush(self) -> None:
        """Moves the new points to the kept ones, and thins these if they are too many."""
        if not self._new:
            return
        new, self._new = np.array(self._new, float).reshape(-1, 3), []
        bad = ~np.isfinite(new[:, 2])
        if bad.any() and not self.not_finite:
            self.first_not_finite = float(new[bad][0, 0])
        self.points += len(new)
        self.not_finite += int(bad.sum())
        new[bad, 2] = np.nan
        kept = np.concatenate([self._kept, new])
        # A step may have several lines, such as those of repeated evaluations: the last one counts.
        kept = kept[np.argsort(kept[:, 0], kind="stable")]
        kept = kept[np.append(kept[1:, 0] != kept[:-1, 0], True)]
        self._kept = thinned(kept, _RANGES) if len(kept) > _CAPACITY else kept

    def rows(self, ranges: int) -> np.ndarray:
        """Returns the points in order of steps, thinned to about 4 · `ranges`.

        Args:
          ranges: Number of ranges of steps; a curve of at most 4 · `ranges` points is whole.

        Returns:
          float64 [n, 3]: step, epoch, value, which is NaN where it is not finite.
        """
        self._flush()
        return self._kept if len(self._kept) <= 4 * ranges else thinned(self._kept, ranges)

    @property
    def last(self) -> Point:
        """The point of the largest step, with a NaN if its value is not finite."""
        self._flush()
        return Point(float(self._kept[-1, 0]), float(self._kept[-1, 2]))

    def best(self, direction: Direction) -> Point | None:
        """Returns the first point with the best value; None if no value is finite.

        Args:
          direction: Whether the largest or the smallest value is best.
        """
        self._flush()
        finite = self._kept[~np.isnan(self._kept[:, 2])]
        if not len(finite):
            return None
        row = finite[finite[:, 2].argmax() if direction == "max" else finite[:, 2].argmin()]
        return Point(float(row[0]), float(row[2]))


def thinned(rows: np.ndarray, ranges: int) -> np.ndarray:
    """Returns the first, last, smallest and largest point of each range, and one that is NaN.

    The first of equal points is the smallest or largest: `Curve.best` names the first best one.

    Args:
      rows: float64 [n, 3]: step in ascending order, epoch, value.
      ranges: Number of equal ranges of steps.
    """
    steps, values = rows[:, 0], rows[:, 2]
    width = (steps[-1] - steps[0]) / ranges
    place = np.minimum((steps - steps[0]) // width if width else steps * 0, ranges - 1)
    begins = _begins(place)
    keep = begins | np.append(begins[1:], True)  # the last point is before the next range
    not_finite = np.isnan(values)
    for some, order in ((not_finite, values), (~not_finite, values), (~not_finite, -values)):
        index = np.flatnonzero(some)
        # The order ascends in each range. The sort is stable, and a NaN is like any other.
        index = index[np.lexsort((order[index], place[index]))]
        keep[index[_begins(place[index])]] = True
    return rows[keep]


def _begins(place: np.ndarray) -> np.ndarray:
    """Marks the first of each run of equal numbers: bool [n]."""
    return np.append(np.ones(min(1, len(place)), bool), place[1:] != place[:-1])
