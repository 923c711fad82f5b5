import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.optimizers import FusedAdagrad, FusedAdam, FusedSGD, LazyAdam, MomentumSGD

ROWS, WIDTH = 6, 3


def rows_of(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), [ROWS, WIDTH])


def updated(optimizer, gradients, dtype="float64"):
    """The weights, and all slots, after each gradient."""
    start = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    variable = keras.Variable(start, dtype=dtype)
    optimizer.build([variable])
    after = []
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
        after.append([v.numpy() for v in (variable, *optimizer.variables[2:])])
    return after


def drawn(updates=5, dtype="float64"):
    random = np.random.default_rng(1)
    for _ in range(updates):
        indices = random.permutation(ROWS)[:3]
        yield random.normal(size=(3, WIDTH)).astype(dtype), indices


def test_moves_the_rows_of_the_gradient_by_the_formula():
    given = list(drawn())
    after = updated(LazyAdam(0.125), [rows_of(*one) for one in given])
    weights = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for update, (values, rows) in enumerate(given, start=1):
        first[rows] = 0.9 * first[rows] + 0.1 * values
        second[rows] = 0.999 * second[rows] + 0.001 * values**2
        rate = 0.125 * np.sqrt(1 - 0.999**update) / (1 - 0.9**update)
        weights[rows] -= rate * first[rows] / (np.sqrt(second[rows]) + 1e-7)
        for value, expected in zip(after[update - 1], (weights, first, second), strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_is_adam_if_every_row_has_a_gradient(amsgrad):
    random = np.random.default_rng(2)
    values = [random.normal(size=(ROWS, WIDTH)) for _ in range(4)]
    gradients = [rows_of(value, np.arange(ROWS)) for value in values]
    lazy = updated(LazyAdam(0.1, amsgrad=amsgrad), gradients)
    dense = updated(LazyAdam(0.1, amsgrad=amsgrad), [tf.constant(value) for value in values])
    adam = updated(FusedAdam(0.1, amsgrad=amsgrad), gradients)
    for one, other, third in zip(lazy, dense, adam, strict=True):
        for value, expected, of_adam in zip(one, other, third, strict=True):
            np.testing.assert_allclose(value, of_adam, rtol=0, atol=1e-12)
            np.testing.assert_array_equal(expected, of_adam)


@pytest.mark.parametrize("make", [LazyAdam, FusedAdagrad, FusedSGD, MomentumSGD])
def test_a_row_that_is_given_twice_gets_one_update_with_the_sum(make):
    arguments = {"momentum": 0.0} if make is MomentumSGD else {}
    once = rows_of(np.array([[3.0, 5, 7], [1, 1, 1]]), [4, 1])
    twice = rows_of(np.array([[1.0, 2, 3], [1, 1, 1], [2, 3, 4]]), [4, 1, 4])
    results = [updated(make(0.1, **arguments), [gradient] * 2)[-1] for gradient in (once, twice)]
    for value, expected in zip(*results, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("make", [LazyAdam, FusedAdagrad])
def test_updates_rows_in_each_dtype(make, dtype):
    given = list(drawn(dtype="float32"))
    gradients = [rows_of(tf.cast(values, dtype), rows) for values, rows in given]
    ours = updated(make(0.1), gradients, dtype)[-1][0].astype("float64")
    expected = updated(make(0.1), [rows_of(v.astype("f8"), rows) for v, rows in given])[-1][0]
    np.testing.assert_allclose(ours, expected, atol=1e-5 if dtype == "float32" else 0.05)
