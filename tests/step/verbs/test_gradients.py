"""Arithmetic of gradients, which are values of the global batch on every replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.step.verbs.gradients import Gradients
from tests.conftest import make_strategy

ONE = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5.0, -6.0])]
OTHER = [np.array([[-1.0, 0.5], [2.0, 1.0]]), np.array([0.0, 3.0])]


@pytest.fixture(params=[("one_device", 1), ("mirrored", 2)], ids=str)
def pair(request):
    set_precision("float64")
    strategy = make_strategy(*request.param)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])

    def made(values):
        of_replicas = [strategy.run(lambda value=value: tf.constant(value)) for value in values]
        return Gradients(strategy, model.trainable_variables, of_replicas)

    return made(ONE), made(OTHER)


def values(gradients):
    results = gradients._strategy.experimental_local_results
    found = [
        [tf.convert_to_tensor(copy).numpy() for copy in results(value)]
        for value in gradients.of_replicas
    ]
    for copies in found:
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    return [copies[0] for copies in found]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: -a,
        lambda a, b: a * 3,
        lambda a, b: 0.5 * a,
        lambda a, b: tf.constant(2.0, tf.float64) * a,
        lambda a, b: a / 4,
        lambda a, b: a / tf.constant(4.0, tf.float64),
        lambda a, b: a + b * 2 - a / 3,
    ],
)
def test_works_variable_by_variable(pair, function):
    expected = [function(a, b) for a, b in zip(ONE, OTHER, strict=True)]
    for ours, theirs in zip(values(function(*pair)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-15)


def test_python_sums_them(pair):
    for ours, a, b in zip(values(sum(pair)), ONE, OTHER, strict=True):
        np.testing.assert_array_equal(ours, a + b)


def flat(arrays):
    return np.concatenate([array.ravel() for array in arrays])


def test_norm_and_dot_take_all_variables_together(pair):
    one, other = pair
    assert float(one.norm()) == pytest.approx(np.linalg.norm(flat(ONE)))
    assert float(one.dot(other)) == pytest.approx(flat(ONE) @ flat(OTHER))
    assert one.norm().shape == one.dot(other).shape == ()


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
    with pytest.raises(ConfigError, match=r"can be added only if both are of the same variables"):
        one.of([bias]) + other
    with pytest.raises(ConfigError, match=r"can be multiplied only if"):
        one.of([bias]).dot(other)


def test_map_changes_each_by_itself(pair):
    one, _ = pair
    seen = []

    def clip(gradient, variable):
        seen.append(variable)
        return tf.clip_by_value(gradient, -2.0, 2.0)

    for ours, a in zip(values(one.map(clip)), ONE, strict=True):
        np.testing.assert_array_equal(ours, a.clip(-2, 2))
    assert set(map(id, seen)) == set(map(id, one.variables))


@pytest.mark.parametrize("factor", [[1.0, 2.0], np.ones([1])])
def test_a_factor_is_a_scalar(pair, factor):
    with pytest.raises(ConfigError, match="a number or a scalar tensor"):
        pair[0] * factor


def test_sparse_gradients_stay_sparse_when_scaled_and_add_up():
    set_precision("float32")
    strategy = tf.distribute.get_strategy()
    table = keras.layers.Embedding(4, 2)
    table.build()
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([3]), tf.constant([4, 2]))
    gradients = Gradients(strategy, table.trainable_variables, [rows])
    assert isinstance((gradients * 2.0).values[0], tf.IndexedSlices)
    expected = np.zeros([4, 2])
    expected[3] = [3, 6]
    np.testing.assert_array_equal(values(gradients + gradients * 2.0)[0], expected)
    other = tf.IndexedSlices(tf.constant([[1.0, 1.0], [5.0, 7.0]]), [3, 0], tf.constant([4, 2]))
    others = Gradients(strategy, table.trainable_variables, [other])
    difference = gradients - others
    assert isinstance(difference.values[0], tf.IndexedSlices)
    np.testing.assert_array_equal(values(difference)[0], [[-5, -7], [0, 0], [0, 0], [0, 1]])
    assert float(gradients.dot(others)) == 3
    assert float(gradients.dot(gradients)) == 5
    assert float(gradients.norm()) == pytest.approx(5**0.5)


def test_values_are_tensors_on_any_number_of_replicas(pair):
    for value, expected in zip(pair[0].values, ONE, strict=True):
        np.testing.assert_array_equal(tf.reduce_sum(value * value), np.sum(expected**2))
