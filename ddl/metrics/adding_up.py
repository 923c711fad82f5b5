"""The check that the state of a metric adds up over examples, weights and batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.metrics.state import KerasState

FAILS = "it fails on random examples: "
"""Beginning of the clause for a metric that raises an error."""

_ROWS = 7


def adding_up(
    name: str,
    make: Callable[[], keras.metrics.Metric],
    labels: tf.TensorSpec,
    outputs: tf.TensorSpec,
    weight_rank: int,
) -> KerasState | str:
    """Returns the state of a metric, or why its sums over parts are not those of the data.

    The metric computes its state of a few random examples with random weights, as a whole and of
    each example alone, for several ranges of labels and outputs: a metric that takes a batch for
    one example, or whose formula depends on all labels of a batch, may add up by chance if these
    are 0 and 1. Eager; in `ddl.metrics.state.alone`.

    Args:
      name: Name of the metric, for errors.
      make: Makes the metric.
      labels: One row: shape without the batch, and dtype.
      outputs: The same for the outputs.
      weight_rank: Number of first dimensions of the labels for which the metric gets weights.

    Returns:
      The state, with the names of its figures; or a clause for an error.
    """
    metric: Any = make()
    is_binary = isinstance(metric, keras.metrics.BinaryIoU)
    if getattr(metric, "sparse_y_pred", False) and outputs.dtype.is_floating and not is_binary:
        # Keras would truncate a probability of 0.9 to class 0.
        return "it takes class numbers as outputs. Pass tf.argmax, or set sparse_y_pred=False"
    random = np.random.default_rng(0)
    try:
        starts = [np.any(v.numpy()) for v in metric.variables]
        # The first update makes the variables that depend on shapes.
        given = _rows(labels, random, 0, 1), _rows(outputs, random, 0.05, 0.95)
        ones = tf.ones([_ROWS, *labels.shape][:weight_rank], tf.float64)
        metric.update_state(*map(tf.constant, given), sample_weight=ones)
        metric.reset_state()
        if any(starts) or not metric.variables or any(np.any(v.numpy()) for v in metric.variables):
            return "it must keep its state in variables of add_variable that start at 0"
        state = KerasState(name, metric, weight_rank)
        return _fault(state, labels, outputs, random) or state
    except Exception as error:
        return f"{FAILS}{error}".strip().rstrip(".")


def _fault(
    state: KerasState, labels: tf.TensorSpec, outputs: tf.TensorSpec, random: np.random.Generator
) -> str | None:
    """Returns the clause for the error, or None; names the figures.

    A range that the metric does not take, or whose state is not finite, does not count; in one of
    the others the state must not be 0.
    """
    computed = tf.function(state.sums, autograph=False)
    last = outputs.shape[-1] - 1 if outputs.shape.rank and outputs.shape[-1] > 1 else 9
    chances = 0.05, 0.95
    ranges: list[Any] = [(0, 1, chances), (0, last, chances), (0, 1, (0, 1))]
    ranges += [] if state.takes_probabilities else [(0, 1, (-3.0, 3.0))]
    ranges += [] if labels.dtype.is_unsigned or labels.dtype.is_bool else [(-1, 1, chances)]
    changes = np.zeros(state.size, bool)
    error: Exception | None = None
    for low, high, of_outputs in ranges:
        given = _rows(labels, random, low, high), _rows(outputs, random, *of_outputs)
        weight = random.integers(1, 4, _ROWS).astype(np.float64)
        weight[0] = 0  # padding, also before the others
        try:
            whole = computed(*map(tf.constant, (*given, weight))).numpy()
            rows = [computed(*map(tf.constant, (*given, row))).numpy() for row in np.diag(weight)]
            onto = state.sums(*map(tf.constant, (*given, weight, whole))).numpy()
        except Exception as raised:
            error = raised
            continue
        if not np.isfinite(whole).all():
            continue
        changes |= whole != 0
        state.figures(whole)
        for found, how in (
            (np.sum(rows, axis=0), "as the sum of those of each example"),
            (onto - whole, "as what is added to an earlier state"),
        ):
            wrong = ~np.isclose(whole, found, rtol=1e-9, atol=1e-9) & state.matters
            if wrong.any():
                place = int(np.argmax(wrong))
                return (
                    f"its state after {_ROWS} examples has {whole[place]:.6g}, but "
                    f"{found[place]:.6g} {how}, for labels from {low} to {high}"
                )
    # The count of a mean does change.
    if not changes[: 1 if isinstance(state.metric, keras.metrics.Mean) else None].any():
        if error is not None:
            raise error
        shapes = f"labels {[_ROWS, *labels.shape]} and outputs {[_ROWS, *outputs.shape]}"
        return f"its state stays 0 for random {shapes}, which may be shapes that it does not take"
    return None


def _rows(spec: tf.TensorSpec, random: np.random.Generator, low: Any, high: Any) -> np.ndarray:
    """Returns random rows: floats in float64 between fractions, else whole numbers."""
    shape = (_ROWS, *spec.shape)
    if spec.dtype.is_floating and isinstance(low, float):
        return random.uniform(low, high, shape)
    dtype = np.float64 if spec.dtype.is_floating else spec.dtype.as_numpy_dtype
    return random.integers(int(low), max(round(high), 1) + 1, shape).astype(dtype)
