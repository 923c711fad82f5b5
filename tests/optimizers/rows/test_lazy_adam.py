import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.optimizers import FusedAdagrad, FusedAdam, FusedSGD, LazyAdam, MomentumSGD
from ddl.optimizers.rows.duplicates import in_pairs

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
    for three in zip(lazy, dense, adam, strict=True):
        for one, other, of_adam in zip(*three, strict=True):
            np.testing.assert_allclose(one, of_adam, rtol=0, atol=1e-12)
            np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_row_without_gradient_stays_whatever_the_form_of_the_gradient(dtype):
    given = list(drawn(dtype="float32"))
    for values, _ in given:
        values[1] = 0  # a row that padding looks up
    named = [rows_of(tf.cast(values, dtype), rows) for values, rows in given]
    dense = [tf.convert_to_tensor(gradient) for gradient in named]
    unnamed = [rows_of(tf.cast(v[[0, 2]], dtype), rows[[0, 2]]) for v, rows in given]
    forms = [updated(LazyAdam(0.1, amsgrad=True), form, dtype) for form in (named, dense, unnamed)]
    for after in zip(*forms, strict=True):
        for one, *others in zip(*after, strict=True):
            for other in others:
                np.testing.assert_array_equal(one, other)
    moved = np.any(forms[1][-1][0] != forms[1][-2][0], axis=1)
    assert sorted(given[-1][1][[0, 2]]) == np.flatnonzero(moved).tolist()


def test_entries_of_a_vector_are_rows_and_a_scalar_is_one():
    for start, gradient, expected in (([1.0, 1], [2.0, 0], [0.9, 1]), (1.0, 2.0, 0.9)):
        variable, optimizer = keras.Variable(start), LazyAdam(0.1)
        for factor in (1.0, 0.0):
            optimizer.apply([tf.constant(gradient) * factor], [variable])
        np.testing.assert_allclose(variable.numpy(), expected, atol=1e-6)


def test_rows_of_gradients_are_paired_whatever_the_dtype_of_their_indices():
    one, other = (
        tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant(rows, dtype), [ROWS, 1])
        for rows, dtype in (([1, 4], tf.int32), ([4, 2], tf.int64))
    )
    for first, second in ((one, other), (other, one)):
        both = in_pairs(tf.add, first, second)
        np.testing.assert_array_equal(tf.convert_to_tensor(both)[:, 0], [0, 1, 2, 0, 3, 0])


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
