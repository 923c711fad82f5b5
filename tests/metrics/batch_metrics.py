"""Metrics whose state does not add up."""

import keras
from keras import ops


class _OneSum(keras.metrics.Metric):
    def __init__(self, start="zeros", **arguments):
        super().__init__(**arguments)
        self.total = self.add_variable((), start, name="total")

    def result(self):
        return self.total  # a variable itself, as Keras's documentation shows it


class SumOfErrors(_OneSum):
    """Adds up."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ops.abs(ops.cast(y_true, self.dtype) - ops.cast(y_pred, self.dtype))
        self.total.assign_add(ops.sum(errors * ops.cast(sample_weight, self.dtype)))


class PerBatch(_OneSum):
    """Adds up the weighted mean of each batch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        weight = ops.cast(sample_weight, self.dtype)
        weighted = ops.sum(ops.cast(y_true, self.dtype) * weight)
        self.total.assign_add(ops.divide_no_nan(weighted, ops.sum(weight)))


class Unweighted(_OneSum):
    """Counts padding."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(y_true, self.dtype) + 1))


class Positives(_OneSum):
    """Counts the examples with a weight, whatever it is."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(sample_weight > 0, self.dtype)))


class Decaying(_OneSum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        new = ops.sum(ops.cast(y_pred, self.dtype) * ops.cast(sample_weight, self.dtype))
        self.total.assign(0.9 * self.total + 0.1 * new)


class Largest(_OneSum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(ops.maximum(self.total, ops.max(ops.cast(y_pred, self.dtype))))


class OutsideOfVariables(SumOfErrors):
    """Counts its updates in Python."""

    updates = 0

    def update_state(self, *inputs, sample_weight=None):
        self.updates += 1
        super().update_state(*inputs, sample_weight=sample_weight)

    def result(self):
        return self.total / self.updates


class FromOne(SumOfErrors):
    def __init__(self, **arguments):
        super().__init__(start="ones", **arguments)


class WithoutWeights(_OneSum):
    def update_state(self, y_true, y_pred):
        self.total.assign_add(ops.sum(ops.cast(y_pred, self.dtype)))


class WithoutConfig(SumOfErrors):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
