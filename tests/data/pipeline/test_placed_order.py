import numpy as np
import pytest
import tensorflow as tf
from ddl.data.pipeline.placed_order import at_least, from_host, kept_on_host, placed

from ddl.data.order import batches_at_once, indices_from
from tests.conftest import make_strategy

ORDER = {"num_examples": 5000, "global_batch_size": 1000, "seed": 3, "shuffle": True}


def test_loop_variables_on_the_host_are_int32_and_keep_all_bits():
    ordered = {
        "index": tf.constant([[0, 2**40 + 7], [-1, 5]], tf.int64),
        "weight": tf.constant([[0.0, 0.1], [1.0, -2.5]]),
    }
    kept = kept_on_host(ordered)
    assert {rows.dtype for rows in kept.values()} == {tf.int32}
    found = from_host(kept)
    for name, rows in ordered.items():
        assert found[name].dtype == rows.dtype
        np.testing.assert_array_equal(found[name], rows)


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_end_of_an_epoch_has_the_shape_of_its_begin(replicas):
    strategy = make_strategy("mirrored" if replicas == 2 else "one_device", replicas)
    assert at_least(strategy) == 16

    @tf.function
    def parts(batch):
        ordered = indices_from(batch, **ORDER, at_least=16)
        placed_rows = placed(ordered, 5000, 1000, strategy)["index"]
        return ordered["index"], strategy.experimental_local_results(placed_rows)

    for batch, count in ((0, 5), (3, 2)):
        ordered, own = parts(tf.constant(batch, tf.int64))
        assert ordered.shape == (count, 1000)
        rows = np.concatenate(own, axis=1)
        assert rows.shape == (5, 1000)
        np.testing.assert_array_equal(rows[:count], ordered)


def test_many_batches_are_ordered_at_once():
    assert batches_at_once(10**6, 64) == 128
    assert batches_at_once(10**6, 2048) == 4
    assert batches_at_once(10**6, 2048, at_least=16) == 16
    assert batches_at_once(10**4, 2048, at_least=16) == 5
    assert batches_at_once(1000, 10) == 100


def test_how_many_are_ordered_at_once_changes_no_order():
    few = indices_from(tf.constant(1, tf.int64), **ORDER)["index"]
    many = indices_from(tf.constant(1, tf.int64), **ORDER, at_least=16)["index"]
    np.testing.assert_array_equal(few, many[: len(few)])
    assert len(many) == 4
