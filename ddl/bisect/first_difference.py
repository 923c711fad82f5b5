"""The first recorded value that differs, and its rows. Imports no TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ddl.checking.comparison import compare
from ddl.checking.recording import AFTER, OF_ROWS, Key, Layer, Part, Recording
from ddl.replay.recorded import Recorded

STAGES = {
    "rows": "data",
    "draw": "draw",
    "layer": "activation",
    "loss": "loss",
    "weight": "loss",
    "metric": "metric",
    "own gradients": "gradient",
    "sums": "metric",
    "gradients": "reduced gradient",
    "applied gradients": "applied gradient",
    "clipped gradients": "clipped gradient",
    "updated slots": "slot",
    "updated weights": "update",
    "weights": "weight",
    "slots": "slot",
    "statistics": "statistic",
    "averages": "average",
    "own variables": "variable of the task",
}
"""The name of each recorded stage in a report, in the order of the computation."""

STATE = "state"
"""The stage of what is not recorded, such as the loss scale, generators and callbacks."""


class Difference(NamedTuple):
    """The first value of an update that differs.

    Attributes:
      step: Number of the update, from 1.
      stage: Kind of the value, one of `STAGES`, or `STATE`.
      name: Its name; for a `STATE`, its paths in a checkpoint.
      replicas: Numbers of the replicas on which it differs; empty where all have it in common.
      rows: Positions of the rows in the global batch that differ; empty for values without rows.
      examples: The indices of their examples in both runs; None if they are not known.
      expected: An entry of the first run's value; NaN for a `STATE`.
      got: The same entry of the second run's value.
      size: The largest difference, relative to the largest value.
      is_missing: Whether only one of the runs computed the value.
      equal: Number of values of this step before it, which are equal.
    """

    step: int
    stage: str
    name: str
    replicas: tuple[int, ...]
    rows: tuple[int, ...]
    examples: tuple[tuple[int, int], ...] | None
    expected: float
    got: float
    size: float
    is_missing: bool
    equal: int


def first_difference(a: Recorded, b: Recorded) -> Difference | None:
    """Returns the first value that differs in its bits, in the first step whose end differs.

    Values are the same ones by their names: a layer that only one of the runs has does not count,
    unless nothing else differs. A step in which nothing but the state beside the variables comes to
    differ, such as the loss scale, counts too.

    Args:
      a: The recorded steps of the first run.
      b: The same steps of the second run, from the same state.

    Returns:
      The difference; None if all steps end in the same state.
    """
    for step in sorted(a.indices):
        both = [_of_step(one.recording, step) for one in (a, b)]
        here, there, alone = _aligned(*both)
        if compare(_ends(here), _ends(there), exact=True).found is None:
            if paths := _of_state(a, b, step):
                name, nan, values = ", ".join(paths), float("nan"), len(here.values)
                return Difference(step, STATE, name, (), (), None, nan, nan, nan, False, values)
            continue
        compared = compare(here, there, exact=True)
        assert compared.found is not None
        found = compared.found
        if alone and found.key.call == AFTER:
            key = alone[0]
            nan = float("nan")
            return Difference(
                step, STAGES[key.stage], key.name, (), (), None, nan, nan, nan, True, 0
            )
        key = found.key
        parts = here.values[key], there.values[key]
        rows = () if key.stage not in OF_ROWS | {"draw"} else _rows(*parts)
        replicas = _replicas(*parts)
        everywhere = {part.replica for each in parts for part in each}
        return Difference(
            step,
            _stage(key, a.recording.layers, alone),
            key.name,
            () if set(replicas) == everywhere else replicas,
            rows,
            _examples(a, b, key, rows),
            found.expected,
            found.got,
            found.size,
            found.is_missing,
            max(0, compared.values - 1),
        )
    return None


def _of_step(recording: Recording, step: int) -> Recording:
    return Recording({k: parts for k, parts in recording.values.items() if k.update == step})


def _ends(recording: Recording) -> Recording:
    """Returns the variables after the step."""
    return Recording({k: parts for k, parts in recording.values.items() if k.call == AFTER})


def _aligned(a: Recording, b: Recording) -> tuple[Recording, Recording, list[Key]]:
    """Returns the values that both runs computed, with the first run's places, and the others.

    A value that only one run computes moves the places of those after it.
    """
    keys = [_by_name(one) for one in (a, b)]
    common = [name for name in keys[0] if name in keys[1]]
    alone = [key for own in keys for name, key in own.items() if name not in common]
    first = {keys[0][name]: a.values[keys[0][name]] for name in common}
    second = {keys[0][name]: b.values[keys[1][name]] for name in common}
    return Recording(first), Recording(second), sorted(alone)


def _by_name(recording: Recording) -> dict[tuple[object, ...], Key]:
    """Returns the keys by call, stage and name, with a number if there are several of them."""
    found: dict[tuple[object, ...], Key] = {}
    for key in sorted(recording.values):
        number = 0
        while (name := (key.call, key.turn, key.stage, key.name, number)) in found:
            number += 1
        found[name] = key
    return found


def _of_state(a: Recorded, b: Recorded, step: int) -> list[str]:
    """Returns the paths of what both checkpoints after a step would hold and that differs."""
    one, other = a.digests.get(step, {}), b.digests.get(step, {})
    return sorted(path for path in one if path in other and one[path] != other[path])


def _stage(key: Key, layers: Mapping[str, Layer], alone: Sequence[Key]) -> str:
    """Returns the stage in words.

    A layer with another output, before which all common values are equal, has drawn other numbers
    if only one of the runs recorded a draw of it.

    Args:
      key: The first value that differs.
      layers: The layers by name.
      alone: The values that only one run computed.
    """
    layer = layers.get(key.name)
    if key.stage == "layer" and layer is not None and (layer.draws or layer.draws_by_position):
        owners = [one.name for one in alone if one[:3] == key[:3] and one.stage == "draw"]
        if any(_is_of(owner, key.name, layer) for owner in owners):
            return STAGES["draw"]
    return STAGES[key.stage]


def _is_of(owner: str, name: str, layer: Layer) -> bool:
    """Returns whether a draw may be one of a layer; seeds of Keras's layers do not name them."""
    return f"{owner}/".startswith(f"{name}/") or (layer.draws and owner.startswith("seed of "))


def _pairs(a: list[Part], b: list[Part]) -> list[tuple[Part, Part]]:
    """Returns the parts of the same replica and rows."""
    others = {part[:2]: part for part in b}
    return [
        (part, others[part[:2]])
        for part in a
        if part[:2] in others and others[part[:2]].value.shape == part.value.shape
    ]


def _differs(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    if one.dtype.kind == "f" and other.dtype.kind == "f":
        return (one != other) & ~(np.isnan(one) & np.isnan(other))
    return np.asarray(one != other)


def _replicas(a: list[Part], b: list[Part]) -> tuple[int, ...]:
    pairs = _pairs(a, b)
    return tuple(sorted({x.replica for x, y in pairs if _differs(x.value, y.value).any()}))


def _rows(a: list[Part], b: list[Part]) -> tuple[int, ...]:
    """Returns the positions in the global batch of the rows that differ."""
    found = set()
    for one, other in _pairs(a, b):
        if one.value.ndim:
            by_row = _differs(one.value, other.value).reshape(len(one.value), -1).any(axis=1)
            found |= {one.first_row + int(row) for row in np.flatnonzero(by_row)}
    return tuple(sorted(found))


def _examples(
    a: Recorded, b: Recorded, key: Key, rows: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Returns the indices of the examples in some rows; None if rows are no examples."""
    both = [run.indices.get(key.update, {}) for run in (a, b)]
    if any(len(sources) != 1 for sources in both):
        return None
    (one,), (other,) = (list(sources.values()) for sources in both)
    if one is None or other is None:
        return None
    if any(row >= len(of["index"]) for of in (one, other) for row in rows):
        return None
    return tuple((int(one["index"][row]), int(other["index"][row])) for row in rows)
