import numpy as np
import tensorflow as tf

from ddl.layers import sum_over_replicas
from ddl.layers.across_replicas import gather_over_replicas, scatter_over_replicas
from tests.conftest import LikeGpus


def on_replicas(strategy, function):
    """Returns each replica's results of a traced `function` of the replica's number."""

    def replica():
        context = tf.distribute.get_replica_context()
        return function(tf.cast(context.replica_id_in_sync_group, tf.float64))

    results = tf.function(lambda: strategy.run(replica))()
    return [strategy.experimental_local_results(each) for each in results]


def rows_of(number):
    """Two rows of a replica, unlike those of the others."""
    return tf.reshape(tf.range(6.0, dtype=tf.float64), [2, 3]) + 10 * number


def check_rows_sums_and_gradients(strategy):
    replicas = strategy.num_replicas_in_sync

    def function(number):
        x, y = rows_of(number), tf.stack([number + 1, 2.0])
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            (every,), total = gather_over_replicas([x]), sum_over_replicas(y)
            (own,) = scatter_over_replicas([every])
            factors = (number + 1) * tf.range(1.0, 2 * replicas + 1, dtype=tf.float64)
            loss = tf.reduce_sum(factors[:, tf.newaxis] * every**2)
            loss += tf.reduce_sum((number + 1) * total**2)
        return every, own, total, *tape.gradient(loss, [x, y])

    every, own, totals, of_rows, of_sums = on_replicas(strategy, function)
    expected = np.concatenate([rows_of(float(number)) for number in range(replicas)])
    numbers = np.arange(1.0, replicas + 1).sum()
    gradient = 2 * numbers * np.arange(1.0, 2 * replicas + 1)[:, np.newaxis] * expected
    total = np.array([numbers, 2.0 * replicas])
    for replica in range(replicas):
        rows = slice(2 * replica, 2 * replica + 2)
        np.testing.assert_array_equal(every[replica], expected)
        np.testing.assert_allclose(own[replica], replicas * expected[rows])
        np.testing.assert_allclose(totals[replica], total)
        np.testing.assert_allclose(of_rows[replica], gradient[rows])
        np.testing.assert_allclose(of_sums[replica], 2 * total * numbers)


def test_rows_sums_and_gradients_of_all_replicas(strategy):
    check_rows_sums_and_gradients(strategy)


def test_by_collectives_as_on_gpus(gpu_path):
    check_rows_sums_and_gradients(LikeGpus(2))
