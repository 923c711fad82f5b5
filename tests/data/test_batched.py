"""Data sets of tf.data that give batches, and those that only look like it."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data.batched import check_not_batched
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


def test_sources_refuse_batches_unless_they_are_windows():
    with pytest.raises(DataError, match="windows=True"):
        as_source(batches())
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
