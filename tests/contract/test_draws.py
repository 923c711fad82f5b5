"""Order of the examples, draws of `ddl.random`, and the learning rate, as a task's weights show."""

import functools

import keras
import numpy as np
import pytest

from tests.conftest import name_of
from tests.contract.recorder import EXAMPLES, STREAMS, record

EPOCH = 5  # updates: four batches of 32, and one of three examples
ONE, TWO, FOUR = ("one_device", 1), ("mirrored", 2), ("mirrored", 4)


@functools.cache
def on_one_device():
    return record(ONE, 2 * EPOCH)


def check_draws(where, accumulation_steps, updates=EPOCH):
    """Raises AssertionError unless all examples are read when one device reads them, and draw what
    they draw there.
    """
    ours = record(where, updates, accumulation_steps=accumulation_steps)
    for own, one in zip(ours, on_one_device()[:updates], strict=True):
        np.testing.assert_array_equal(own.examples, one.examples)
        np.testing.assert_allclose(own.drawn, one.drawn, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("where", "accumulation_steps"),
    [(ONE, 4), (TWO, 2), (FOUR, 1), (("central_storage", 2), 1)],
    ids=lambda each: name_of(each) if isinstance(each, tuple) else str(each),
)
def test_order_and_draws_do_not_depend_on_devices_and_microbatches(where, accumulation_steps):
    check_draws(where, accumulation_steps)


def test_an_epoch_reads_each_example_once():
    for epoch in (on_one_device()[:EPOCH], on_one_device()[EPOCH:]):
        assert [len(each.examples) for each in epoch] == [32, 32, 32, 32, 3]
        read = np.concatenate([each.examples for each in epoch])
        assert sorted(read) == list(range(EXAMPLES))


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    first, second = (on_one_device()[start].examples for start in (0, EPOCH))
    (other,) = record(ONE, 1, seed=1)
    orders = [first, second, other.examples, np.arange(32)]
    assert len({tuple(each) for each in orders}) == 4


def test_draws_differ_between_examples_updates_and_calls():
    for stream in ("normal", "uniform"):
        drawn = np.concatenate([each.drawn[:, STREAMS.index(stream)] for each in on_one_device()])
        assert len(np.unique(drawn.round(9))) == len(drawn)
    shared = [each.drawn[:, STREAMS.index("shared")] for each in on_one_device()]
    assert all(np.ptp(each) < 1e-12 for each in shared)
    assert len(np.unique([each[0].round(9) for each in shared])) == len(shared)
    first, again = (on_one_device()[0].drawn[:, STREAMS.index(s)] for s in ("normal", "again"))
    assert np.abs(first - again).min() > 0


def test_each_update_has_the_rate_of_a_schedule():
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.125, 0.25, 0.5])
    expected = [0.125, 0.125, 0.25, 0.25, 0.5, 0.5]
    trained = record(TWO, 6, rate)
    for update, one, factor in zip(trained, on_one_device(), expected, strict=False):
        np.testing.assert_allclose(update.drawn, factor * one.drawn, rtol=0, atol=1e-10)
