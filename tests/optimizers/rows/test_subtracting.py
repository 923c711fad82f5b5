"""Rows of a table are subtracted from with the same bits on each path."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution.path import CPU, GPU, taking
from ddl.optimizers import FusedAdagrad, FusedSGD
from ddl.optimizers.rows.subtracting import subtract_rows

PATHS = {"CPU": CPU, "GPU": GPU}


def operations(function):
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    return [operation.type for operation in graph.get_operations()]


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float32, tf.float64])
def test_each_path_subtracts_the_same_bits(dtype):
    random = np.random.default_rng(0)
    start = tf.cast(random.normal(size=(50, 3)), dtype)
    rows = tf.constant(random.permutation(50)[:20])
    values = tf.cast(random.normal(size=(20, 3)), dtype)
    after = []
    for name in PATHS:
        variable = tf.Variable(start)
        update = tf.function(lambda v=variable: subtract_rows(v, rows, values), autograph=False)
        with taking(PATHS[name]):
            update()
        after.append(variable.numpy())
    np.testing.assert_array_equal(*after)
    expected = start.numpy()
    expected[rows] -= values.numpy()
    np.testing.assert_array_equal(after[0], expected)


@pytest.mark.parametrize("make", [FusedAdagrad, FusedSGD])
@pytest.mark.parametrize("name", PATHS)
def test_updates_of_rows_use_the_kernel_of_their_path(make, name):
    """The kernel that subtracts at once takes twice as long on a CPU."""
    variable = tf.Variable(tf.zeros([5, 2]))
    optimizer = make(0.1)
    optimizer.build([variable])
    gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3]), tf.constant([5, 2]))
    with taking(PATHS[name]):
        found = operations(lambda: optimizer.update_step(gradient, variable, 0.1))
    assert ("ResourceScatterSub" in found) == (name == "GPU")
