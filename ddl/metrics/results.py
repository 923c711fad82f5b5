"""Results of Keras metrics from their sums, without the small numbers that Keras adds.

Keras adds 1e-7 to the denominators of F-scores and of intersections over unions, and divides the
latter in float32. Their results here are exact to float64. A denominator of 0 gives 0, as in Keras.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def result_of(metric: keras.metrics.Metric) -> Callable[[list[np.ndarray]], Any]:
    """Returns a function from the values of a metric's variables to its result. Eager.

    The result is a number, an array, or a dict of such.
    """
    own = _OWN.get(type(metric).result)
    if own is None:
        return lambda values: _of_keras(metric, values)
    return lambda values: own(metric, values)


def _of_keras(metric: keras.metrics.Metric, values: list[np.ndarray]) -> Any:
    variables = metric.variables
    states = [tf.constant(x, v.dtype) for x, v in zip(values, variables, strict=True)]

    def array(result: Any) -> np.ndarray:
        # A result that is a variable itself would be read after Keras has put its value back.
        of = [x for x, v in zip(values, variables, strict=True) if v is result]
        return of[0] if of else np.asarray(result)

    return keras.tree.map_structure(array, metric.stateless_result(states))


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(
        numerator, denominator, out=np.zeros_like(numerator), where=np.asarray(denominator) != 0
    )


def _f_beta(metric: Any, values: list[np.ndarray]) -> np.ndarray:
    right, wrong, missed, support = map(np.asarray, values)
    squared = metric.beta**2
    score = _divided((1 + squared) * right, (1 + squared) * right + wrong + squared * missed)
    if metric.average == "weighted":
        return np.sum(_divided(score * support, np.sum(support, keepdims=True)))
    return score if metric.average is None else np.mean(score)


def _iou(metric: Any, values: list[np.ndarray]) -> np.ndarray:
    (matrix,) = values
    both = np.diag(matrix)
    union = matrix.sum(axis=0) + matrix.sum(axis=1) - both
    of_classes = np.array(metric.target_class_ids)
    both, union = both[of_classes], union[of_classes]
    present = union > 0  # the mean leaves out classes that neither labels nor outputs have
    return _divided(_divided(both, union).sum(), np.array(float(present.sum())))


_OWN: dict[Any, Callable[[Any, list[np.ndarray]], Any]] = {
    keras.metrics.FBetaScore.result: _f_beta,
    keras.metrics.IoU.result: _iou,
}
