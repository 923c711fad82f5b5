"""MomentumSGD, LARS and LAMB against their papers, with NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.optimizers import MomentumSGD
from tests.conftest import make_strategy
from tests.optimizers.given_gradients import assert_close, drawn, updated

# Down, up by a lot, through zero, and back.
RATES = [0.1, 0.1, 0.01, 0.4, 0.4, 0.0, 0.0, 0.2, 0.05]


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rates):
        self.rates = rates

    def __call__(self, step):
        return tf.gather(tf.constant(self.rates, tf.float64), tf.cast(step, tf.int32))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_keeps_the_rate_outside_of_the_velocity(nesterov):
    start, gradients = drawn(len(RATES))
    weights = [w.copy() for w in start]
    velocities = [np.zeros_like(w) for w in weights]
    expected = []
    for rate, each in zip(RATES, gradients, strict=True):
        for w, v, g in zip(weights, velocities, each, strict=True):
            v[:] = 0.9 * v + g
            w -= rate * ((g + 0.9 * v) if nesterov else v)
        expected.append([w.copy() for w in weights])
    strategy = make_strategy("mirrored", 2)
    ours, _ = updated(strategy, lambda: MomentumSGD(Rates(RATES), 0.9, nesterov), start, gradients)
    assert_close(ours, expected)
