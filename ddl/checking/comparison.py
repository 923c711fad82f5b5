"""The first value, in the order of the computation, in which two runs differ."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ddl.checking.recording import OF_ROWS, Key, Part, Recording

_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 5e-2}
"""Tolerated relative differences, by the bytes of the narrowest dtype so far."""

_OF_GROUP = 1e-3
"""A value counts as at least this share of the largest one of its stage.

The exact value of some gradients is zero, such as of a bias before BatchNormalization. Their
computed values are rounding.
"""

_LEAST = 1e-6

# Stages of one call that count their positions separately, in their order; all others come first.
_PHASES = {"sums": 1, "gradients": 2, "updated weights": 3}

_Pairs = list[tuple[np.ndarray, np.ndarray]]


class Found(NamedTuple):
    """A value that differs.

    Attributes:
      key: The value.
      size: The largest difference, relative to the largest value.
      expected: The entry of the reference where the difference is largest.
      got: The same entry of the other run.
      row: Position of the entry's example in the batch; None for values without rows.
      ratio: The other value divided by the reference, if that is one number; else None.
      is_missing: Whether only one of the runs computed the value.
      order: Place of the value in the order of the computation.
    """

    key: Key
    size: float
    expected: float
    got: float
    row: int | None = None
    ratio: float | None = None
    is_missing: bool = False
    order: tuple[int, ...] = ()


class Compared(NamedTuple):
    """The result of a comparison.

    Attributes:
      found: The first difference; None if there is none.
      values: Number of values that were compared.
      largest: The largest relative difference of floats that counts as rounding.
    """

    found: Found | None
    values: int
    largest: float


def compare(reference: Recording, other: Recording, exact: bool = False) -> Compared:
    """Compares two runs.

    Args:
      reference: The run with the expected values.
      other: The other run; values of updates that it did not make are left out if `exact`.
      exact: Whether the values must be equal to the bit, as after a resume.
    """
    place = _places([*reference.values, *other.values])
    made = {key.update for key in (other.values if exact else reference.values)}
    keys = sorted((key for key in reference.values if key.update in made), key=place)
    groups = _groups(reference, keys)
    weights = _weights(reference, keys)
    narrowest, count, largest = 8, 0, 0.0
    found: Found | None = None
    for key in keys:
        expected, got = reference.values[key], other.values.get(key)
        pairs, axis = (None, None) if got is None else paired(expected, got)
        if got is None or pairs is None:
            found = Found(key, np.inf, np.nan, np.nan, is_missing=True, order=place(key))
            break
        dtypes = [part.value.dtype for part in (*expected, *got)]
        if key.stage in ("layer", "loss") and dtypes[0].kind not in "biu":
            narrowest = min(narrowest, *(dtype.itemsize for dtype in dtypes))
        tolerance = 0.0 if exact else _TOLERANCES[narrowest]
        count += 1
        keep = None
        if axis is not None and key.stage in OF_ROWS and not exact:
            keep = weights.get((key.update, key.call, key.turn))
        worst, size = _worst(key, pairs, axis, keep, groups[_group(key)], tolerance)
        if worst is not None:
            found = worst._replace(order=place(key))
            break
        largest = max(largest, size)
    extra = min(
        (key for key in other.values if key not in reference.values), key=place, default=None
    )
    if extra is not None and (found is None or place(extra) < found.order):
        found = Found(extra, np.inf, np.nan, np.nan, is_missing=True, order=place(extra))
    return Compared(found, count, largest)


def paired(expected: Sequence[Part], got: Sequence[Part]) -> tuple[_Pairs | None, int | None]:
    """Returns the arrays to compare, and the axis of the rows.

    Parts of a batch are joined along the axis in which they are smaller than the reference, in the
    order of their rows. Values of the same shape in all parts, such as weights, are compared one
    by one.

    Returns:
      Pairs of arrays, None if the shapes do not fit; and the axis, None without rows.
    """
    expected = sorted(expected, key=lambda part: (part.first_row, part.replica))
    got = sorted(got, key=lambda part: (part.first_row, part.replica))
    shapes = [{part.value.shape for part in parts} for parts in (expected, got)]
    if len(shapes[0]) > 1 or len(shapes[1]) > 1:
        return None, None
    (first,), (second,) = shapes
    if first == second:
        if len(expected) == len(got):
            return [(a.value, b.value) for a, b in zip(expected, got, strict=True)], None
        return [(expected[0].value, part.value) for part in (*expected[1:], *got)], None
    if len(first) != len(second):
        return None, None
    axes = [a for a, (own, other) in enumerate(zip(first, second, strict=True)) if own != other]
    if len(axes) > 1 or first[axes[0]] * len(expected) != second[axes[0]] * len(got):
        return None, None
    whole = [np.concatenate([p.value for p in parts], axes[0]) for parts in (expected, got)]
    return [(whole[0], whole[1])], axes[0]


def _worst(
    key: Key,
    pairs: _Pairs,
    axis: int | None,
    weights: np.ndarray | None,
    of_group: float,
    tolerance: float,
) -> tuple[Found | None, float]:
    """Returns the largest difference of a value, and its size if it counts as rounding."""
    largest, worst = 0.0, None
    for expected, got in pairs:
        if axis is not None and weights is not None and len(weights):
            kept = _kept(weights, expected.shape[axis])
            if kept is not None:
                expected, got = (np.compress(kept, x, axis) for x in (expected, got))
        if not expected.size:
            continue
        if expected.dtype.kind in "biu":
            distance = (expected != got).astype(float)
            scale, tolerated = 1.0, 0.0
        else:
            expected, got = expected.astype(np.float64), got.astype(np.float64)
            distance = _distance(expected, got)
            finite = np.abs(expected[np.isfinite(expected)])
            scale = max(finite.max(initial=0.0), _OF_GROUP * of_group, _LEAST)
            tolerated = tolerance
        size = float(distance.max()) / scale
        if size > tolerated and (worst is None or size > worst.size):
            place = np.unravel_index(int(np.argmax(distance)), distance.shape)
            worst = Found(
                key,
                size,
                float(expected[place]),
                float(got[place]),
                None if axis is None else int(place[axis]),
                _ratio(expected, got),
            )
        elif size <= tolerated:
            largest = max(largest, size)
    return worst, largest


def _kept(weights: np.ndarray, length: int) -> np.ndarray | None:
    """Returns which entries along an axis belong to examples that count, bool [length]."""
    if length % len(weights):
        return None
    return np.repeat(weights > 0, length // len(weights))


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(one - other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(same, 0.0, np.nan_to_num(distance, nan=np.inf, posinf=np.inf))


def _ratio(expected: np.ndarray, got: np.ndarray) -> float | None:
    """Returns the number by which all entries are multiplied; None if there is none."""
    expected, got = np.ravel(expected).astype(float), np.ravel(got).astype(float)
    norm = float(np.dot(expected, expected))
    if not np.isfinite(norm) or norm == 0 or not np.isfinite(got).all():
        return None
    ratio = float(np.dot(expected, got)) / norm
    close = np.abs(got - ratio * expected).max() <= 1e-6 * max(np.abs(got).max(), 1e-300)
    return ratio if close and ratio != 0 else None


def _group(key: Key) -> tuple[int, int, str]:
    return key.update, key.call, key.stage


def _groups(recording: Recording, keys: Iterable[Key]) -> dict[tuple[int, int, str], float]:
    """Returns the largest absolute value of each stage of each call."""
    found: dict[tuple[int, int, str], float] = {}
    for key in keys:
        for part in recording.values[key]:
            if part.value.dtype.kind not in "biu" and part.value.size:
                values = np.abs(part.value.astype(np.float64))
                own = float(values[np.isfinite(values)].max(initial=0.0))
                found[_group(key)] = max(found.get(_group(key), 0.0), own)
            else:
                found.setdefault(_group(key), 0.0)
    return found


def _weights(recording: Recording, keys: Iterable[Key]) -> dict[tuple[int, int, int], np.ndarray]:
    """Returns the weights of the examples in each call; 0 for padding."""
    return {
        (key.update, key.call, key.turn): np.concatenate(
            [p.value for p in sorted(recording.values[key], key=lambda part: part.first_row)]
        )
        for key in keys
        if key.stage == "rows" and key.name == "weight"
    }


def _places(keys: Iterable[Key]) -> Callable[[Key], tuple[int, ...]]:
    """Returns a function that gives the place of a key in the order of the computation.

    Neighbouring calls that are made several times in an update are those of a loop: all calls of
    one turn come before the next turn.
    """
    repeated = {(key.update, key.call) for key in keys if key.turn}

    def place(key: Key) -> tuple[int, ...]:
        start = key.call
        while {(key.update, start), (key.update, start - 1)} <= repeated:
            start -= 1
        phase = _PHASES.get(key.stage, 0)
        return key.update, start, key.turn, key.call, phase, key.position

    return place
