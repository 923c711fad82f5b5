"""MomentumSGD against its formula, with NumPy; tests/contract has LARS and LAMB."""

import keras
import numpy as np
import pytest

from ddl.optimizers import MomentumSGD

# Down, up by a lot, through zero, and back.
RATES = [0.1, 0.1, 0.01, 0.4, 0.4, 0.0, 0.0, 0.2, 0.05]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_keeps_the_rate_outside_of_the_velocity(nesterov):
    random = np.random.default_rng(0)
    weights, velocity = random.normal(size=5), np.zeros(5)
    variable = keras.Variable(weights, dtype="float64")
    optimizer = MomentumSGD(0.1, 0.9, nesterov)
    for rate in RATES:
        gradient = random.normal(size=5)
        velocity = 0.9 * velocity + gradient
        weights = weights - rate * ((gradient + 0.9 * velocity) if nesterov else velocity)
        optimizer.learning_rate = rate
        optimizer.apply([gradient], [variable])
        np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-6)
