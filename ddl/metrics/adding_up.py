"""The check that the state of a metric adds up over examples, weights and batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.metrics.probabilities import input_fault
from ddl.metrics.state import KerasState

FAILS = "it fails on random examples: "
"""How the clause begins if the metric raises an error."""

_ROWS, _FIRST = 7, 2
_TOLERANCE = 1e-9


def adding_up(
    name: str,
    make: Callable[[], keras.metrics.Metric],
    labels: tf.TensorSpec,
    outputs: tf.TensorSpec,
    weight_rank: int,
) -> KerasState | str:
    """Returns the state of a metric, or why its sums over parts are not those of the data.

    The metric computes its state of a few random examples with random weights, as a whole and in
    parts. Eager; in `ddl.metrics.in_float64.alone`.

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
    given = [_random(spec, random, of_outputs) for of_outputs, spec in enumerate((labels, outputs))]
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
        fault = _fault(state, given, random)
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


def _random(spec: tf.TensorSpec, random: np.random.Generator, are_outputs: int) -> np.ndarray:
    """Returns random rows that most metrics take: labels 0 and 1, outputs between them."""
    shape = (_ROWS, *spec.shape)
    if are_outputs and spec.dtype.is_floating:
        return random.uniform(0.05, 0.95, shape)
    return random.integers(0, 2, shape).astype(spec.dtype.as_numpy_dtype)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=False)
