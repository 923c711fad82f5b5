"""Values of runs on a few rows, of which some were replaced, and how they are compared."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

_TOLERANCES = {8: 1e-13, 4: 1e-5, 2: 1e-2}
"""Tolerated differences, relative to the largest value, by the bytes of the narrowest float dtype.

Kernels give a row the same bits at the same shape. A task that selects tokens from its rows runs
kernels at other shapes, which round differently. In half precision, the rounding then hides what is
no larger, so the tolerance there is for such a task alone.
"""

_NOISES = 10
"""A dependence is a difference above this multiple of that between identical runs."""

_BATCHES = 3


class RowValues(NamedTuple):
    """Values of an output.

    Attributes:
      values: float64, of any shape.
      tolerance: The tolerated difference, relative to the largest value.
    """

    values: np.ndarray
    tolerance: float

    def at_one_shape(self) -> "RowValues":
        """Returns the values with the tolerance of kernels that run at the same shapes."""
        return self._replace(tolerance=min(self.tolerance, _TOLERANCES[4]))


def tolerance_of(dtype: tf.DType) -> float:
    """Returns the tolerance of values that were computed in a dtype; 0 for integers."""
    return _TOLERANCES[dtype.size] if dtype.is_floating else 0.0


def dependences(runs: Sequence[dict[str, RowValues]]) -> dict[str, str]:
    """Returns the outputs whose values changed in kept rows, each with an example of the change.

    Args:
      runs: Values for the batches of `row_independence`, and optionally for the first batch again,
        which measures the differences between identical runs.
    """
    first, *replaced = runs[:_BATCHES]
    found: dict[str, str] = {}
    for name, one in first.items():
        values, least = one.values, max(_least(one), _noise(runs, name))
        for third, other in enumerate(replaced):
            changed = _distance(values, other[name].values) > least
            if len(changed) > 1:  # a first dimension of 1 belongs to all rows
                changed[np.arange(len(changed)) % 3 != third] = False
            if changed.any():
                place = tuple(int(i) for i in np.unravel_index(np.argmax(changed), changed.shape))
                found[name] = (
                    f"{values[place]:.6g} in row {place[0]}, but {other[name].values[place]:.6g} "
                    "with other rows in the batch"
                )
    return found


def _noise(runs: Sequence[dict[str, RowValues]], name: str) -> float:
    """Returns what a difference of an output must exceed; 0 without a run that was repeated."""
    first, again = runs[0][name].values, [run[name].values for run in runs[_BATCHES:]]
    return max((_NOISES * _distance(first, one).max(initial=0.0) for one in again), default=0.0)


def noisy(runs: Sequence[dict[str, RowValues]]) -> list[str]:
    """Returns the outputs of which two runs on the same examples differ by more than rounding."""
    return [name for name, one in runs[0].items() if _noise(runs, name) > _NOISES * _least(one)]


def _least(one: RowValues) -> float:
    """Returns the largest difference that rounding explains."""
    return one.tolerance * np.abs(one.values[np.isfinite(one.values)]).max(initial=0.0)


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the absolute difference of each entry; 0 for equal infinities and for two NaNs."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(one - other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(same, 0.0, np.nan_to_num(distance, nan=np.inf))
