"""Arithmetic of gradients, which are values of the global batch on every replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.gradients import Gradients
from tests.conftest import make_strategy

ONE = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5.0, -6.0])]
OTHER = [np.array([[-1.0, 0.5], [2.0, 1.0]]), np.array([0.0, 3.0])]


@pytest.fixture(params=[("one_device", 1), ("mirrored", 2)], ids=str)
def pair(request):
    strategy = make_strategy(*request.param)
    with strategy.scope():
        variables = [keras.Variable(value, dtype="float64") for value in ONE]

    def made(values):
        of_replicas = [strategy.run(lambda value=value: tf.constant(value)) for value in values]
        return Gradients(strategy, variables, of_replicas, None)

    return made(ONE), made(OTHER)


def values(gradients):
    results = gradients._strategy.experimental_local_results
    found = [[copy.numpy() for copy in results(value)] for value in gradients.of_replicas]
    for copies in found:
        np.testing.assert_array_equal(copies[-1], copies[0])
    return [copies[0] for copies in found]


def test_works_variable_by_variable(pair):
    def function(a, b):
        return (
            sum([a, b * 2, a * (-1 / tf.constant(3.0, tf.float64))])
            - tf.constant(2.0, tf.float64) * b
        )

    for ours, one, other in zip(values(function(*pair)), ONE, OTHER, strict=True):
        np.testing.assert_allclose(ours, function(one, other), rtol=1e-14)


def test_norm_and_dot_take_all_variables_together(pair):
    one, other = (np.concatenate([array.ravel() for array in arrays]) for arrays in (ONE, OTHER))
    assert float(pair[0].norm()) == pytest.approx(np.linalg.norm(one))
    assert float(pair[0].dot(pair[1])) == pytest.approx(one @ other)
    assert pair[0].norm().shape == pair[0].dot(pair[1]).shape == ()


def test_parts_are_taken_and_joined(pair):
    one, other = pair
    kernel, bias = one.variables
    (only,) = values(one.of([bias]))
    np.testing.assert_array_equal(only, ONE[1])
    joined = one.of([bias]).and_of(other.of([kernel]))
    assert joined.variables == (bias, kernel)
    np.testing.assert_array_equal(values(joined)[1], OTHER[0])
    with pytest.raises(ConfigError, match="both hold gradients of"):
        one.and_of(other.of([kernel]))
    with pytest.raises(ConfigError, match="hold no gradient of"):
        one.of([bias]).of([kernel])
    with pytest.raises(ConfigError, match=r"gradients of the same variables alone"):
        one.of([bias]).dot(other)
