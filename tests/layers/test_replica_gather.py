import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.layers.replica_gather import gather_over_replicas, scatter_over_replicas
from tests.conftest import LikeGpus, for_every_strategy, make_strategy, microbatch
from tests.layers.test_replica_sum import on_replicas

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool"]


def rows_of(number, width=3):
    """Two rows of a replica, unlike those of the others."""
    return tf.reshape(tf.range(2.0 * width, dtype=tf.float64), [2, width]) + 10 * number


def check_rows_and_gradients(strategy):
    replicas = strategy.num_replicas_in_sync

    def function(number):
        x, y = rows_of(number), rows_of(number, 1)[:, 0] ** 2
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            every, of_y = gather_over_replicas([x, y])
            factors = (number + 1) * tf.range(1.0, 2 * replicas + 1, dtype=tf.float64)
            loss = tf.reduce_sum(factors[:, tf.newaxis] * every**2) + tf.reduce_sum(of_y)
        return every, of_y, *tape.gradient(loss, [x, y])

    every, of_y, of_rows, of_squares = on_replicas(strategy, function)
    expected = np.concatenate([rows_of(float(number)) for number in range(replicas)])
    factors = np.arange(1.0, replicas + 1).sum() * np.arange(1.0, 2 * replicas + 1)
    gradient = 2 * factors[:, np.newaxis] * expected
    for replica in range(replicas):
        own = slice(2 * replica, 2 * replica + 2)
        np.testing.assert_array_equal(every[replica], expected)
        squares = [rows_of(float(number), 1)[:, 0] ** 2 for number in range(replicas)]
        np.testing.assert_array_equal(of_y[replica], np.concatenate(squares))
        np.testing.assert_allclose(of_rows[replica], gradient[own])
        np.testing.assert_allclose(of_squares[replica], [replicas] * 2)


@for_every_strategy
def test_rows_and_gradients_of_all_replicas(strategy):
    check_rows_and_gradients(strategy)


@pytest.mark.parametrize("replicas", [2, 3])
def test_by_collectives_as_on_gpus(replicas, gpu_path):
    check_rows_and_gradients(LikeGpus(replicas))


@pytest.mark.parametrize("make", [lambda: make_strategy("mirrored", 2), lambda: LikeGpus(2)])
def test_dtypes_keep_their_values(make, gpu_path):
    strategy = make()

    def function(number):
        values = [rows_of(number)] * 2
        return gather_over_replicas([tf.cast(x, dtype) for dtype in DTYPES for x in values])

    expected = np.concatenate([rows_of(0.0), rows_of(1.0)])
    for place, results in enumerate(on_replicas(strategy, function)):
        dtype = tf.as_dtype(DTYPES[place // 2])
        for result in results:
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, tf.cast(expected, dtype))


NAN_BITS = int(np.array([0x7F800001, 0xFF812345], "u4").view("i8")[0])  # signalling NaNs of float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("make", [lambda: make_strategy("mirrored", 2), lambda: LikeGpus(2)])
def test_integers_keep_their_bits_beside_floats(make, dtype, gpu_path):
    integers = np.array([[-1, 2**62 + 1], [-(2**63), NAN_BITS]])

    def function(number):
        x = tf.cast(rows_of(number), dtype)
        with tf.GradientTape() as tape:
            tape.watch(x)
            small = tf.constant([-(2**31), 2**31 - 1], tf.int32)
            floats, of_64, of_32 = gather_over_replicas([x, tf.constant(integers), small])
            loss = tf.reduce_sum(floats)
        return of_64, of_32, tape.gradient(loss, x)

    of_64, of_32, gradient = on_replicas(make(), function)
    for replica in range(2):
        np.testing.assert_array_equal(of_64[replica], np.concatenate([integers] * 2))
        np.testing.assert_array_equal(of_32[replica], [-(2**31), 2**31 - 1] * 2)
        np.testing.assert_array_equal(tf.cast(gradient[replica], "float64"), np.full((2, 3), 2.0))


def test_two_replicas_send_hardly_more_than_the_rows(gpu_path):
    """By the collectives, as several workers use them: the rows there, the gradients back."""
    strategy, rows, width = LikeGpus(2), 64, 32

    def function():
        x, batch = tf.ones([rows, width]), microbatch(rows=rows, mask=[True] * rows)
        with tf.GradientTape() as tape, batch.forward():
            tape.watch(x)
            others = ddl.gather(x)
            loss = tf.reduce_sum(tf.where(others.mask[:, tf.newaxis], others.rows, 0.0))
        return tape.gradient(loss, x)

    graph = tf.function(lambda: strategy.run(function), autograph=False).get_concrete_function()
    sent = dict.fromkeys(("CollectiveGatherV2", "CollectiveAllToAllV2"), 0)
    for operation in graph.graph.get_operations():
        if operation.type.startswith("Collective"):
            values = operation.inputs[0]
            sent[operation.type] += values.shape.num_elements() * values.dtype.size
    bytes_of_rows = 4 * rows * width
    assert bytes_of_rows <= sent["CollectiveGatherV2"] / 2 <= 1.1 * bytes_of_rows
    # [2, rows]: each replica keeps one of the two.
    assert bytes_of_rows <= sent["CollectiveAllToAllV2"] / 4 <= 1.1 * bytes_of_rows


def test_half_precision_is_summed_in_more():
    def function(number):
        values = tf.where(number == 0, 1.0, 2.0**-8)
        (sums,) = scatter_over_replicas([tf.fill([4, 1], tf.cast(values, tf.bfloat16))])
        return (tf.cast(sums, tf.float64),)

    (results,) = on_replicas(make_strategy("mirrored", 4), function)
    expected = float(tf.cast(1 + 3 * 2.0**-8, tf.bfloat16))  # term by term it would stay 1
    assert expected != 1
    for result in results:
        np.testing.assert_array_equal(result, [[expected]])


def test_gradients_of_gradients():
    def function(number):
        x = rows_of(number)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = (number + 1) * tf.reduce_sum(gather_over_replicas([x])[0] ** 3)
            gradient = inner.gradient(loss, x)
        return gradient, outer.gradient(gradient, x)

    first, second = on_replicas(make_strategy("mirrored", 2), function)
    for number in range(2):
        rows = rows_of(float(number))
        np.testing.assert_allclose(first[number], 3 * 3 * rows**2)
        np.testing.assert_allclose(second[number], 3 * 6 * rows)


def test_alone_it_is_the_tensor():
    values = [tf.constant([3.0])]
    assert gather_over_replicas(values)[0] is values[0]
    assert scatter_over_replicas(values)[0] is values[0]
