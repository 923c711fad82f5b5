"""Data sets of tf.data that give batches, and those that only look like it."""

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.batched import check_not_batched, has_changing_order, single_examples

from ddl.data.conversion import as_source
from ddl.data.stream import StreamSource
from ddl.errors import DataError


def examples(count=20) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
        {"x": np.zeros((count, 3), np.float32), "label": np.zeros(count, np.int32)}
    )


def batches() -> tf.data.Dataset:
    return examples().batch(5, drop_remainder=True)


BATCHED = {
    "batch": batches,
    "in parallel": lambda: examples().batch(5, drop_remainder=True, num_parallel_calls=2),
    "padded": lambda: examples().padded_batch(5, drop_remainder=True),
    "rebatched": lambda: batches().rebatch(10, drop_remainder=True),
    "transformed": lambda: (
        batches()
        .map(lambda batch: {**batch, "x": batch["x"] / 2})
        .cache()
        .shuffle(3)
        .repeat(2)
        .skip(1)
        .take(3)
        .prefetch(1)
        .with_options(tf.data.Options())
    ),
    "filtered": lambda: batches().filter(lambda batch: True),
    "concatenated": lambda: batches().concatenate(batches()),
    "zipped": lambda: tf.data.Dataset.zip(
        batches().map(lambda batch: batch["x"]), batches().map(lambda batch: batch["label"])
    ),
    "mixed": lambda: tf.data.Dataset.sample_from_datasets([batches(), batches()]),
    "with a shorter last batch": lambda: examples().batch(5),
    "given its shape later": lambda: (
        examples()
        .batch(5)
        .map(
            lambda batch: {name: tf.ensure_shape(v, [5, *v.shape[1:]]) for name, v in batch.items()}
        )
    ),
}

SINGLE = {
    "examples": examples,
    "unbatched": lambda: batches().unbatch(),
    "mixed": lambda: tf.data.Dataset.sample_from_datasets([examples(), examples()]),
    "split windows": lambda: (
        tf.data.Dataset.range(101).batch(5, drop_remainder=True).map(lambda w: (w[:-1], w[1:]))
    ),
    "windows with one label": lambda: (
        tf.data.Dataset.range(101).batch(5, drop_remainder=True).map(lambda w: (w[:-1], w[-1]))
    ),
    "means over batches": lambda: batches().map(lambda batch: tf.reduce_mean(batch["x"], 0)),
    "overlapping windows": lambda: (
        tf.data.Dataset.range(20)
        .window(5, shift=1, drop_remainder=True)
        .flat_map(lambda window: window.batch(5, drop_remainder=True))
    ),
    "records read in batches": lambda: batches().flat_map(tf.data.Dataset.from_tensor_slices),
    "as many rows as labels": lambda: examples().map(
        lambda one: {"x": tf.zeros([5, 2]), "label": tf.zeros([5])}
    ),
}


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED)
def test_batches_are_refused(make):
    with pytest.raises(DataError, match=r"batches of (5|10) rows, made by .*batch.*unbatch\(\)"):
        check_not_batched(make())


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_single_examples_and_windows_pass(make):
    check_not_batched(make())


def test_streams_refuse_batches_unless_they_are_windows():
    with pytest.raises(DataError, match="windows=True"):
        StreamSource(batches())
    with pytest.raises(DataError, match="batches of 5 rows"):
        StreamSource(lambda epoch: batches().shuffle(4, seed=1), 4)
    source = StreamSource(batches(), windows=True)
    assert len(source) == 4
    assert source.element_spec["x"].shape == (5, 3)


def test_windows_need_one_size():
    remedy = r"the last may be shorter. Write batch\(5, drop_remainder=True\)"
    with pytest.raises(DataError, match=remedy):
        StreamSource(examples().batch(5), windows=True)
    split = tf.data.Dataset.range(101).batch(5).map(lambda w: (w[:-1], w[-1]))
    for windows in (False, True):
        with pytest.raises(DataError, match=remedy):
            StreamSource(split, windows=windows)


X, Y, W = np.arange(66.0).reshape(22, 3), np.arange(22), np.linspace(1, 2, 22)
FORMS = {
    "(x, y)": (X, Y),
    "(x, y, sample_weight)": (X, Y, W),
    "dict": {"x": X, "label": Y},
    "(dict, y)": ({"x": X, "z": -X}, Y),
    "(dict, y, sample_weight)": ({"x": X}, Y, W),
}
WAYS = {
    "batch": lambda data: data.batch(4),
    "without the rest": lambda data: data.batch(4, drop_remainder=True),
    "mapped and prefetched": lambda data: (
        data.batch(4).map(lambda *all: all[0] if len(all) == 1 else all).cache().prefetch(2)
    ),
    "padded": lambda data: data.padded_batch(4),
    "batches given later": lambda data: (
        data.batch(22)
        .unbatch()
        .batch(4)
        .apply(tf.data.experimental.assert_cardinality(6))
        .rebatch(2, drop_remainder=True)
        .apply(tf.data.experimental.assert_cardinality(11))
    ),
}


def rows_of(source, count):
    (batch,) = source.batches(count, 0, seed=0, shuffle=False).take(1)
    return {name: values.numpy() for name, values in batch.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_every_form_are_split_into_their_examples(form, way):
    """In order, all of them, with the features that the arrays themselves have."""
    expected, source = (
        as_source(FORMS[form]),
        as_source(WAYS[way](tf.data.Dataset.from_tensor_slices(FORMS[form]))),
    )
    count = 20 if way == "without the rest" else 22
    assert len(source) == count
    wanted = rows_of(expected, 22)
    found = rows_of(source, count)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values[:count])


def test_single_examples_stay_as_they_are():
    given = examples()
    assert single_examples(given) is given


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.batch(5).repeat(), "infinite"),
        (lambda data: data.batch(5, drop_remainder=True).repeat(), "infinite"),
        (lambda data: data.batch(5).filter(lambda batch: True), "unknown"),
        (lambda data: data.filter(lambda one: True).batch(5), "unknown"),
        (lambda data: data.batch(5).take(2), "unknown"),
        (lambda data: data.batch(5).concatenate(data.batch(5)), "unknown"),
        (lambda data: data.batch(3).rebatch(5), "unknown"),
    ],
)
def test_batches_whose_number_of_rows_is_unknown_are_refused(change, told):
    with pytest.raises(DataError, match=rf"examples is {told}.*dataset\.unbatch\(\), num_examples"):
        as_source(change(examples(22)))


def twice(batch):
    return {name: tf.concat([values, values], 0) for name, values in batch.items()}


def fewer(batch):
    return {name: values[1:] for name, values in batch.items()}


@pytest.mark.parametrize(("change", "told"), [(twice, "added rows"), (fewer, "contained only")])
def test_a_map_that_changes_the_number_of_rows_fails(change, told):
    source = as_source(examples(20).batch(5).map(change))
    with pytest.raises(tf.errors.OpError, match=told):
        rows_of(source, 20)


@pytest.mark.parametrize(
    ("shuffled", "changes"),
    [
        (lambda data: data, False),
        (lambda data: data.shuffle(5), True),
        (lambda data: data.shuffle(5, seed=1), True),
        (lambda data: data.shuffle(5, reshuffle_each_iteration=False), True),
        (lambda data: data.shuffle(5, seed=1, reshuffle_each_iteration=False), False),
        (lambda data: tf.data.Dataset.zip((data, data.shuffle(5))).map(lambda a, b: a), True),
    ],
)
def test_an_order_that_changes_is_reported(shuffled, changes, caplog):
    tf.random.set_seed(None)
    batches = shuffled(examples()).batch(5).prefetch(1)
    assert has_changing_order(batches) == changes
    as_source(batches)
    assert ("Remove it, since the Trainer shuffles" in caplog.text) == changes


def test_a_warning_comes_once_for_each_data_set(caplog):
    """A run converts its data to find their number, and again in the Trainer."""
    for data in (batches(), examples().shuffle(3)):
        with caplog.at_level("WARNING"):
            for _ in range(2):
                as_source(data)
        assert len(caplog.records) == 1
        caplog.clear()
