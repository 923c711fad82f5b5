"""The check that the state of a metric adds up over examples, weights and batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.metrics.probabilities import input_fault
from ddl.metrics.state import KerasState

FAILS = "it fails on random examples: "
"""Beginning of the clause for a metric that raises an error."""

_ROWS, _FIRST = 7, 2
_TOLERANCE = 1e-9
_VALUES = 10
"""Number of different labels, if the outputs have no dimension of classes."""


def adding_up(
    name: str,
    make: Callable[[], keras.metrics.Metric],
    labels: tf.TensorSpec,
    outputs: tf.TensorSpec,
    weight_rank: int,
) -> KerasState | str:
    """Returns the state of a metric, or why its sums over parts are not those of the data.

    The metric computes its state of a few random examples with random weights, as a whole and in
    parts, and again with other ranges of labels and outputs: a metric that takes a batch for one
    example, or whose formula depends on all labels of a batch, may add up by chance if these are 0
    and 1. Eager; in `ddl.metrics.in_float64.alone`.

    Args:
      name: Name of the metric, for errors.
      make: Makes the metric.
      labels: One row: shape without the batch, and dtype.
      outputs: The same for the outputs.
      weight_rank: Number of first dimensions of the labels for which the metric gets weights.

    Returns:
      The state, with the names of its figures; or a clause for an error.
    """
    if fault := input_fault(metric := make(), outputs.dtype):
        return fault
    random = np.random.default_rng(0)
    given = [_integers(labels, random, 0, 1), _outputs(outputs, random)]
    try:
        starts_at_0 = not any(np.any(v.numpy()) for v in metric.variables)
        # The first update makes the variables that depend on shapes.
        shape = [_ROWS, *labels.shape][:weight_rank]
        metric.update_state(*map(tf.constant, given), sample_weight=tf.ones(shape, tf.float64))
        metric.reset_state()
        starts_at_0 = starts_at_0 and not any(np.any(v.numpy()) for v in metric.variables)
        if not metric.variables or not starts_at_0:
            return "it must keep its state in variables of add_variable that start at 0"
        state = KerasState(name, metric, weight_rank)
        fault = _fault(state, given, random) or _fault_of_rows(state, labels, outputs, random)
    except Exception as error:
        return f"{FAILS}{error}".strip().rstrip(".")
    return state if fault is None else fault


def _fault(state: KerasState, given: list[np.ndarray], random: np.random.Generator) -> str | None:
    """Returns the clause for the error, or None; names the figures."""
    weight = random.integers(0, 4, _ROWS).astype(np.float64)
    weight[0], weight[-1] = 0, 3  # padding, also before the others
    other = random.integers(1, 4, _ROWS).astype(np.float64)

    def sums(rows: slice | np.ndarray, weight: np.ndarray, prior: np.ndarray | None = None) -> Any:
        labels, outputs = (tf.constant(values[rows]) for values in given)
        return state.sums(labels, outputs, tf.constant(weight[rows]), prior).numpy()

    every = slice(None)
    whole = sums(every, weight)
    state.name_figures(whole)
    figures = state.figures(whole)
    counted = np.flatnonzero(weight)
    for found, what in (
        (sums(every, weight), "computed again"),
        (sums(counted, weight), "without the examples of weight 0"),
        (
            sums(slice(_FIRST), weight) + sums(slice(_FIRST, None), weight),
            f"as the sum of those of the first {_FIRST} and the last {_ROWS - _FIRST}",
        ),
        (
            sums(every, weight + other) - sums(every, other),
            "as the difference of those with larger weights",
        ),
        (sums(every, weight, whole) - whole, "as what is added to an earlier state"),
    ):
        for name, place in state.variables:
            if not _equal(whole[place], found[place]):
                worst = int(np.argmax(np.abs(whole[place] - found[place])))
                return (
                    f"its state {name!r} after {_ROWS} examples is {whole[place][worst]:.6g}, but "
                    f"{found[place][worst]:.6g} {what}"
                )
    if not np.array_equal(figures, state.figures(whole), equal_nan=True):
        return "its result changes with the number of updates, not only with its variables"
    return None


def _fault_of_rows(
    state: KerasState, labels: tf.TensorSpec, outputs: tf.TensorSpec, random: np.random.Generator
) -> str | None:
    """Returns the clause for the error if the sum over every single row differs, or None.

    Several ranges of labels and outputs are tried. A range that the metric does not take, or whose
    state is not finite, does not count; in one of the others the state must not be 0.
    """
    computed = tf.function(state.sums, autograph=False)
    changes = np.zeros(state.size, bool)
    for low, high, kind in _ranges(labels, outputs):
        if kind == "logits" and state.takes_probabilities:
            continue
        given = _integers(labels, random, low, high), _outputs(outputs, random, kind)
        weight = random.integers(1, 4, _ROWS).astype(np.float64)
        try:
            whole = computed(*map(tf.constant, (*given, weight))).numpy()
            # Rows of weight 0 are replaced by the one that counts: one trace serves all.
            rows = [computed(*map(tf.constant, (*given, row))).numpy() for row in np.diag(weight)]
            found = np.sum(rows, axis=0)
        except Exception:
            continue
        if not np.isfinite(whole).all():
            continue
        changes |= whole != 0
        for name, place in state.variables:
            if not _equal(whole[place], found[place]):
                worst = int(np.argmax(np.abs(whole[place] - found[place])))
                return (
                    f"its state {name!r} after {_ROWS} examples is {whole[place][worst]:.6g}, but "
                    f"{found[place][worst]:.6g} as the sum of those of each example, for labels "
                    f"{list(given[0].shape)} from {low} to {high} and outputs "
                    f"{list(given[1].shape)}"
                )
    # The count of a mean does change.
    if not changes[state.variables[0][1] if state.is_mean else slice(None)].any():
        return (
            f"its state stays 0 for random labels {[_ROWS, *labels.shape]} and outputs "
            f"{[_ROWS, *outputs.shape]}, which may be shapes that it does not take"
        )
    return None


def _ranges(labels: tf.TensorSpec, outputs: tf.TensorSpec) -> list[tuple[int, int, str]]:
    """Returns the smallest and the largest label of each draw, and the kind of the outputs."""
    has_classes = outputs.shape.rank and outputs.shape[-1] > 1
    last = outputs.shape[-1] - 1 if has_classes else _VALUES - 1
    ranges = [(0, 1, "probabilities"), (0, 1, "logits"), (0, last, "probabilities")]
    ranges.append((0, last, "classes"))
    if not labels.dtype.is_unsigned and not labels.dtype.is_bool:
        ranges.append((-1, 1, "probabilities"))
    return ranges


def _integers(spec: tf.TensorSpec, random: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Returns random rows of whole numbers, of the dtype of the spec."""
    rows = random.integers(low, high + 1, (_ROWS, *spec.shape))
    return rows.astype(spec.dtype.as_numpy_dtype)


def _outputs(
    spec: tf.TensorSpec, random: np.random.Generator, kind: str = "probabilities"
) -> np.ndarray:
    """Returns random outputs: "probabilities", "logits" or "classes"; whole numbers as the spec."""
    if not spec.dtype.is_floating:
        return _integers(spec, random, 0, _VALUES - 1 if kind == "classes" else 1)
    shape = (_ROWS, *spec.shape)
    if kind == "classes":
        return random.integers(0, 2, shape).astype(np.float64)
    low, high = (-3.0, 3.0) if kind == "logits" else (0.05, 0.95)
    return random.uniform(low, high, shape)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=False)
