"""Replay buffers alone: places, contents, draws and errors."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import ReplayBuffer
from ddl.data.pipeline import LivePipeline
from ddl.errors import ConfigError, DataError
from tests.conftest import make_strategy


def rows(first, number):
    numbers = np.arange(first, first + number)
    return {"number": numbers, "image": np.stack([numbers, -numbers], 1).astype("f4")}


def test_the_latest_rows_stay():
    buffer = ReplayBuffer(5, rows(0, 2))
    assert (buffer.size, buffer.added, len(buffer)) == (2, 2, 5)
    for first, number in ((2, 2), (4, 3), (7, 0), (7, 5)):
        buffer.add(rows(first, number))
        end = first + number
        held = np.arange(max(0, end - 5), end)
        np.testing.assert_array_equal(buffer.contents()["number"], held)
        np.testing.assert_array_equal(buffer.contents()["image"][:, 1], -held)
    assert buffer.size == 5


def test_added_rows_may_all_count_nothing():
    buffer = ReplayBuffer(3, x=np.ones(2), weight=np.ones(2))
    buffer.add(x=np.zeros(1), weight=np.zeros(1))
    np.testing.assert_array_equal(buffer.contents()["weight"], [1, 1, 0])
    with pytest.raises(DataError, match="'weight' must be one float per example"):
        buffer.add(x=np.zeros(1), weight=np.zeros(1, int))


def test_variables_are_not_mirrored():
    """A scope would give each device a copy."""
    with make_strategy("mirrored", 2).scope():
        buffer = ReplayBuffer(5, rows(0, 2))
    for variable in tf.nest.flatten(buffer.variables):
        assert not hasattr(variable, "values")
        assert variable.device.endswith("CPU:0")


def drawn(buffer, update, batches=1, replicas=1, microbatches=1, size=4096):
    pipeline = LivePipeline(buffer, size, seed=3, microbatches=microbatches)
    pipeline.batches_per_update = batches
    kind = "mirrored" if replicas > 1 else "one_device"
    made = pipeline.rows(tf.constant(update, tf.int64), make_strategy(kind, replicas))
    return made["number"].numpy()


def test_draws_are_uniform_and_differ_by_batch():
    buffer = ReplayBuffer(10, rows(0, 8))
    first, second = drawn(buffer, 0), drawn(buffer, 1)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, drawn(buffer, 0))
    counts = np.bincount(np.concatenate([first, second]), minlength=10)
    assert list(counts[8:]) == [0, 0]  # places that no row has
    assert np.abs(counts[:8] - 1024).max() < 5 * np.sqrt(1024)
    # The second batch does not repeat words of the first.
    assert np.mean(first[4:] == second[:-4]) < 0.2


def test_an_update_with_several_batches_draws_them_one_after_the_other():
    buffer = ReplayBuffer(1000, rows(0, 1000))
    of_each = [drawn(buffer, number, size=8) for number in (6, 7, 8)]
    np.testing.assert_array_equal(drawn(buffer, 2, batches=3, size=8), np.concatenate(of_each))
    # Grouped by replica: in each batch, replica 0 computes the first half of each microbatch.
    joined = drawn(buffer, 2, batches=3, replicas=2, microbatches=2, size=8).reshape(2, 3, 4)
    for place, batch in enumerate(of_each):
        np.testing.assert_array_equal(joined[0, place], batch[[0, 1, 4, 5]])
        np.testing.assert_array_equal(joined[1, place], batch[[2, 3, 6, 7]])


@pytest.mark.parametrize(
    ("capacity", "features", "error", "message"),
    [
        (0, rows(0, 1), ConfigError, "at least 1, got 0"),
        (2.5, rows(0, 1), ConfigError, "got 2.5"),
        (5, rows(0, 0), DataError, r"got shape \(0,\). Pass data with examples"),
        (5, rows(0, 6), DataError, "5 places got 6 rows"),
        (5, {"text": np.array(["a"])}, DataError, "is text"),
        (5, {"image": np.full([1, 2], np.nan)}, DataError, "NaN"),
    ],
)
def test_bad_buffers(capacity, features, error, message):
    with pytest.raises(error, match=message):
        ReplayBuffer(capacity, features)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"number": np.arange(2)}, "must have the features image, number, got number"),
        ({**rows(0, 2), "image": np.zeros([2, 3], "f4")}, r"shape \(2,\) for each row"),
        ({**rows(0, 2), "image": np.zeros([2, 2])}, "float32 .* got float64 .* Convert it"),
        ({**rows(0, 2), "number": np.arange(3)}, "the same number of examples"),
        ({**rows(0, 2), "image": np.full([2, 2], np.inf, "f4")}, "infinite"),
        (rows(0, 9), "8 places got 9 rows"),
    ],
)
def test_bad_rows(features, message):
    buffer = ReplayBuffer(8, rows(0, 2))
    with pytest.raises(DataError, match=message):
        buffer.add(features)
    assert buffer.added == 2


def test_no_rows_are_added_in_a_graph_or_a_loop():
    buffer = ReplayBuffer(8, rows(0, 2))
    with pytest.raises(ConfigError, match="in a graph"):
        tf.function(lambda: buffer.add(rows(2, 1)), autograph=False)()
    with buffer.being_read(), pytest.raises(ConfigError, match="while the training loop runs"):
        buffer.add(rows(2, 1))


def test_it_is_training_data_alone():
    buffer = ReplayBuffer(8, rows(0, 2))
    with pytest.raises(DataError, match="Mixture needs data whose examples are found"):
        ddl.data.Mixture([buffer, buffer], [1, 1])
    with pytest.raises(ConfigError, match="cannot be part of another source"):
        buffer.batches(4, 0)
    with pytest.raises(ConfigError, match="cannot be evaluated"):
        LivePipeline(buffer, 4, shuffle=False)
    with pytest.raises(ConfigError, match="can be sent to workers, got ReplayBuffer"):
        LivePipeline(buffer, 4).packed_arrays()  # with parameter servers
    with pytest.raises(ConfigError, match="can be kept on the devices, got ReplayBuffer"):
        LivePipeline(buffer, 4, resident=True)
