import functools
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.data import as_source, endless
from ddl.data.checks import data_errors
from ddl.data.order import indices_at
from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken

COUNT, ROWS = 23, 5


class Batches(keras.utils.PyDataset):
    def __init__(self, count=COUNT, change=lambda number, x: x, **options):
        super().__init__(**options)
        self.count, self.change, self.read = count, change, []

    def __len__(self):
        return -(-self.count // ROWS)

    def __getitem__(self, number):
        self.read.append(number)
        x = np.arange(number * ROWS, min((number + 1) * ROWS, self.count), dtype=np.float32)
        return self.change(number, x), x


class WithoutEnd(Batches):
    num_batches = None


class Changing(Batches):
    def on_epoch_end(self):
        pass


@pytest.mark.parametrize("batch", [3, 5, 10, 30])
def test_each_epoch_has_each_example_once_with_batches_shuffled(batch):
    source = as_source(Batches())
    assert len(source) == COUNT
    steps = source.steps_per_epoch(batch)
    epochs = []
    for epoch in (0, 1):
        batches = taken(source, steps, first=epoch * steps, batch=batch)
        x = np.concatenate([b["label"] for b in batches])
        weight = np.concatenate([b["weight"] for b in batches])
        assert not weight[COUNT:].any()
        epochs.append(x[:COUNT])
        assert sorted(x[:COUNT]) == list(range(COUNT))
        for group in x[:20].reshape(4, ROWS):  # examples of a batch stay together
            np.testing.assert_array_equal(group, group[0] + np.arange(ROWS))
        np.testing.assert_array_equal(x[20:COUNT], [20, 21, 22])
    assert epochs[0].tolist() != epochs[1].tolist()


def test_in_order_and_any_batch_is_found_and_rows_of_it():
    source = as_source(Batches())
    x = np.concatenate([b["label"] for b in taken(source, 3, batch=8, shuffle=False)])
    np.testing.assert_array_equal(x, [*range(COUNT), 0])
    straight, rows = taken(source, 7, batch=8), np.array([7, 2])
    for whole, part in zip(
        straight[4:], taken(source, 3, first=4, batch=8, rows=rows), strict=True
    ):
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][rows], err_msg=name)


def test_only_the_batches_of_the_rows_are_read():
    batches = Batches()
    source = as_source(batches)
    batches.read.clear()
    taken(source, 2, batch=10, shuffle=False, rows=np.array([6, 7]))
    # Threads may have read ahead, but never another worker's batches.
    assert {1, 3} <= set(batches.read) <= {0, 1, 3}


def test_without_end():
    batches = WithoutEnd(10**6)
    source = endless(batches, steps_per_epoch=2)
    batches.read.clear()
    x = np.concatenate([b["label"] for b in taken(source, 2, first=1000, batch=4)])
    np.testing.assert_array_equal(x, np.arange(4000, 4008))
    assert min(batches.read) == 800
    assert source.steps_per_epoch(4) == 2
    assert source.is_endless


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Changing(), "Changing.on_epoch_end changes the data from epoch to epoch"),
        (Batches(0), "must have at least one batch, got 0. Correct"),
        (
            Batches(change=lambda n, x: np.random.default_rng().random(len(x))),
            "Two reads of batch 0",
        ),
        (Batches(change=lambda n, x: x[:2]), "the same number of rows, .* got .* Return arrays"),
        (Batches(change=lambda n, x: float(n)), "must have the same number of rows"),
    ],
)
def test_what_is_found_at_the_start(data, message):
    with pytest.raises(DataError, match=message):
        as_source(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, x: x[:, None] if n == 2 else x, "'image' of batch 2 must be float32"),
        (lambda n, x: x.astype("f8") if n == 2 else x, "'image' of batch 2 must be float32"),
    ],
)
def test_a_later_batch_of_another_form_is_named(change, message):
    with pytest.raises(DataError, match=message), data_errors():
        taken(as_source(Batches(change=change)), 5)


def test_a_short_batch_in_the_middle_is_named():
    class Short(Batches):
        def __getitem__(self, number):
            x, y = super().__getitem__(number)
            return (x[:3], y[:3]) if number == 2 else (x, y)

    message = "batch 2 must have 5, got 3"
    with pytest.raises(DataError, match=message), data_errors():
        taken(as_source(Short()), 6)


def test_lengths_that_do_not_fit():
    with pytest.raises(ConfigError, match="has a length of its own"):
        endless(Batches(), steps_per_epoch=3)
    with pytest.raises(ConfigError, match="must be at least 1, since the PyDataset has no known"):
        as_source(WithoutEnd())


def test_batches_are_shuffled_as_examples_are():
    count = 5000  # more than one part of the order
    source = as_source(Batches(count * ROWS))
    shuffled = indices_at(
        tf.range(count, dtype=tf.int64), tf.constant(1, tf.int64), num_examples=count, seed=0
    )
    expected = (shuffled.numpy()[:, np.newaxis] * ROWS + np.arange(ROWS)).reshape(-1)
    first, size = 40, 512  # batch 40 crosses the end of the first part
    steps = source.steps_per_epoch(size)
    x = np.concatenate([b["label"] for b in taken(source, 3, first=steps + first, batch=size)])
    np.testing.assert_array_equal(x, expected[first * size :][: 3 * size])


@pytest.mark.parametrize(
    ("count", "seconds", "expected"), [(100, 0.0, 16), (10, 0.0, 3), (100, 1.0, 1)]
)
def test_one_call_reads_several_batches_of_an_epoch_if_that_is_fast(count, seconds, expected):
    source = as_source(Batches(count))
    source._seconds = [seconds * ROWS] * 3
    source._examples.checked_look_up = looked_up = mock.Mock(
        side_effect=source._examples.checked_look_up
    )
    taken(source, 1, batch=4, shuffle=False)
    assert len(looked_up.call_args_list[0].args[0]) == expected * 4


@pytest.mark.parametrize(
    ("slow", "is_slow"), [("each batch once", True), ("the first read", False)]
)
def test_one_slow_read_is_no_slow_data_and_a_batch_that_is_kept_no_fast_data(slow, is_slow):
    @functools.cache
    def read(number):
        time.sleep(0.05)

    def change(number, x):
        read(number if is_slow else 0)
        return {"x": x}

    assert (as_source(Batches(change=change))._batches_at_once(ROWS) == 1) == is_slow


@pytest.mark.parametrize("size", [5, 10])
def test_whole_batches_may_fill_one_array(size):
    array = np.zeros(ROWS, np.float32)

    def fill(_, x):
        array[: len(x)] = x
        return {"x": array[: len(x)]}

    batches = taken(as_source(Batches(23, fill)), 3, batch=size, shuffle=False)
    wanted = np.arange(3 * size)
    assert np.concatenate([b["x"] for b in batches]).tolist() == (wanted % 23).tolist()


def test_batches_may_fill_one_array():
    array = np.zeros(ROWS, np.float32)

    def fill(_, x):
        array[: len(x)] = x
        return {"x": array[: len(x)]}

    batches = taken(as_source(Batches(20, fill)), 3, batch=6, shuffle=False)
    assert np.concatenate([b["x"] for b in batches]).tolist() == list(range(18))


def test_text_of_each_row():
    source = as_source(Batches(change=lambda _, x: {"text": np.array([f"n{int(v)}" for v in x])}))
    (batch,) = taken(source, 1, batch=7, shuffle=False)
    assert batch["text"].tolist() == [f"n{number}".encode() for number in range(7)]
