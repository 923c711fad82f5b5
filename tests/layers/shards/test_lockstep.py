"""Shards on any replicas: the same sums, the same order, errors instead of waiting for ever."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.layers import sum_over_replicas
from ddl.layers.shards import lockstep
from tests.conftest import make_strategy

SHARDS = 4
VALUES = np.random.default_rng(0).normal(size=[SHARDS, 30]).astype("f4")


def of_all_shards(strategy, function):
    """Returns the results of a function of each shard's value, in the order of the shards."""
    count = SHARDS // strategy.num_replicas_in_sync

    def replica():
        first = tf.distribute.get_replica_context().replica_id_in_sync_group * count

        def shard():
            return function(tf.gather(VALUES, first + lockstep.current().number))

        return lockstep.over_shards(count, shard)

    results = tf.function(lambda: strategy.run(replica), autograph=False)()
    parts = [strategy.experimental_local_results(one) for one in results]  # [shard][replica]
    return [parts[shard][r] for r in range(SHARDS // count) for shard in range(count)]


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("one_device", 1), ("mirrored", 2), ("mirrored", 4), ("central_storage", 2)],
)
def test_sums_have_the_same_bits_on_any_replicas(name, replicas):
    def function(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            total = sum_over_replicas(value)
            loss = tf.reduce_sum(total**3)
        return tf.stack([total, tape.gradient(loss, value)])

    (a, b, c, d) = VALUES
    total = (a + b) + (c + d)
    of_each = 3 * total**2
    gradient = (of_each + of_each) + (of_each + of_each)
    for result in of_all_shards(make_strategy(name, replicas), function):
        np.testing.assert_array_equal(result[0], total)
        np.testing.assert_allclose(result[1], gradient, rtol=1e-6)


def test_rows_come_in_the_order_of_the_shards_and_are_combined_once():
    calls = []

    def combined(rows):
        calls.append(rows)
        return tf.identity(rows)

    results = of_all_shards(
        make_strategy("mirrored", 2), lambda value: lockstep.current().from_all(value, combined)
    )
    assert len(calls) == 2  # once for the shards of each replica
    for rows in results:
        np.testing.assert_array_equal(rows, VALUES)


def test_a_held_back_variable_is_written_once():
    variable = keras.Variable(1.0)

    @tf.function(autograph=False)
    def run():
        def shard():
            with lockstep.current().keeping_writes([variable]):
                variable.assign(variable * 2)
                return tf.identity(variable.value)

        return lockstep.over_shards(SHARDS, shard)

    strategy = make_strategy("one_device", 1)
    tf.function(lambda: strategy.run(run.python_function), autograph=False)()
    assert float(variable) == 2


def test_an_error_of_one_shard_ends_all():
    def function(value):
        if lockstep.current().number:
            raise KeyError("of a shard")
        return sum_over_replicas(value)

    with pytest.raises(KeyError, match="of a shard"):
        of_all_shards(make_strategy("one_device", 1), function)
    assert lockstep.current() is None


def test_shards_that_part_are_an_error():
    def function(value):
        return value if lockstep.current().number else sum_over_replicas(value)

    with pytest.raises(ConfigError, match="at different places"):
        of_all_shards(make_strategy("one_device", 1), function)


def test_an_exchange_in_a_loop_is_an_error():
    def function(value):
        return tf.while_loop(lambda _: True, lambda x: (sum_over_replicas(x),), (value,))[0]

    with pytest.raises(ConfigError, match="Call it outside"):
        of_all_shards(make_strategy("one_device", 1), function)
