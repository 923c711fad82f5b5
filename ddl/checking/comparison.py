"""The values of a run in the order of the computation, and the first one in which two differ."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddl.figures import EXAMPLES_PER_SECOND
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.training.trainer import Trainer

_NO_FIGURES = ("step", "epoch", "split", EXAMPLES_PER_SECOND)
_OF_KIND = 1e-2
"""A value counts as at least this share of the largest one of its kind.

The exact gradient of some weights is zero, such as of a bias before BatchNormalization. An
optimizer that divides by the gradient's size makes rounding of such a weight.
"""


class Value(NamedTuple):
    """A value after an update.

    Attributes:
      update: Number of the update, from 1.
      kind: "train figure", "weight", "layer's variable", which is not trained, "task's variable",
        which is in no layer, or "eval figure".
      name: Name of the figure, or path of the variable.
      copies: float64, one for each replica; of a figure only one.
    """

    update: int
    kind: str
    name: str
    copies: list[np.ndarray]


class Found(NamedTuple):
    """A value that differs.

    Attributes:
      position: Position of the value in the order of the computation.
      value: The value of the other run.
      size: The largest difference, relative to the largest entry, or to 1% of the largest one of
        its kind if that is more; infinite if the runs compute different values here, or one is not
        finite.
      expected: The entry of the reference where the difference is largest.
      got: The same entry of the other run.
    """

    position: int
    value: Value
    size: float
    expected: float = math.nan
    got: float = math.nan


def values_of(trainer: Trainer, update: int) -> list[Value]:
    """Returns figures and variables after an update. Eager, cross-replica context."""
    figures: dict[str, list[Value]] = {"train": [], "eval": []}
    for row in trainer.history:
        if row["step"] == update:
            figures[row["split"]] += [
                Value(update, f"{row['split']} figure", name, [np.asarray(row[name])])
                for name in row
                if name not in _NO_FIGURES
            ]
    layers = layers_of(trainer.task)
    # `weights` leaves out the states of seed generators, which belong to a replica.
    weights = {id(w): w for layer in layers for w in layer.weights}.values()
    own = own_variables_of(trainer.task, layers)
    numeric = [v for v in own if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool]
    copies = trainer.strategy.experimental_local_results
    named: list[tuple[str, str, Any]] = [
        *(("weight", w.path, w.value) for w in weights if w.trainable),
        *(("layer's variable", w.path, w.value) for w in weights if not w.trainable),
        *(("task's variable", v.name, v) for v in numeric),
    ]
    variables = [
        Value(update, kind, name, [np.asarray(one, np.float64) for one in copies(variable)])
        for kind, name, variable in named
    ]
    return [*figures["train"], *variables, *figures["eval"]]


def compare(
    expected: Sequence[Value], got: Sequence[Value], tolerance: float
) -> tuple[Found | None, float]:
    """Compares the values of two runs.

    Args:
      expected: The values of the reference.
      got: Those of the other run.
      tolerance: Largest relative difference that counts as rounding; 0 compares bits.

    Returns:
      The first value that differs, None if there is none; and the largest relative difference
      before it.
    """
    largest: dict[str, float] = {}
    for one in expected:
        largest[one.kind] = max(largest.get(one.kind, 0.0), _size(one.copies[0]))
    most = 0.0
    for position, (first, second) in enumerate(itertools.zip_longest(expected, got)):
        if first is None or second is None or first[:3] != second[:3]:
            return Found(position, second or first, math.inf), most
        found = _worst(position, first, second, _OF_KIND * largest[first.kind])
        if found.size > tolerance:
            return found, most
        most = max(most, found.size)
    return None, most


def _worst(position: int, expected: Value, got: Value, least: float) -> Found:
    """Returns the largest difference between the reference's first copy and all others."""
    first = expected.copies[0]
    scale = max(_size(first), least) or 1.0
    worst = Found(position, got, 0.0)
    for copy in (*expected.copies[1:], *got.copies):
        if copy.shape != first.shape:
            return Found(position, got, math.inf)
        with np.errstate(invalid="ignore"):
            apart = np.abs(copy - first)
        apart = np.where((copy == first) | (np.isnan(copy) & np.isnan(first)), 0.0, apart)
        apart = np.where(np.isnan(apart), math.inf, apart) / scale
        if apart.size and apart.max() > worst.size:
            at = np.unravel_index(apart.argmax(), apart.shape)
            worst = Found(position, got, float(apart[at]), float(first[at]), float(copy[at]))
    return worst


def _size(array: np.ndarray) -> float:
    """Returns the largest finite entry of an array, without its sign."""
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))
