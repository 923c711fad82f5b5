"""Batches by length: their examples, their order, and errors."""

import numpy as np
import pytest

import ddl
from ddl.data.pipeline import BatchPipeline
from ddl.data.pipeline.buckets import buckets_of
from ddl.errors import ConfigError, DataError
from tests.data.varying.documents import LENGTHS, TOKENS, Decoded, an_epoch, arrays, lines

BOUNDARIES = (4, 8, 12)


@pytest.fixture(params=["arrays", "examples", "lines"])
def source(request, tmp_path):
    made = {"arrays": arrays, "examples": Decoded, "lines": lambda: lines(tmp_path)}
    return ddl.data.bucketed(made[request.param](), BOUNDARIES)


def buckets_in(source, batch, epoch=0, seed=3, shuffle=True):
    steps = source.steps_per_epoch(batch)
    numbers = source.buckets(batch, epoch * steps, seed=seed, shuffle=shuffle)
    return list(numbers.take(steps).as_numpy_iterator())


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_example_once_an_epoch_in_batches_of_its_bucket(source, shuffle):
    orders = []
    for epoch in range(2):
        batches = an_epoch(source, 4, epoch, shuffle)
        numbers = buckets_in(source, 4, epoch, shuffle=shuffle)
        assert len(batches) == sum(-(-n // 4) for n in np.bincount((LENGTHS - 1) // 4))
        for bucket, batch in zip(numbers, batches, strict=True):
            np.testing.assert_array_equal((batch["length"] - 1) // 4, bucket)
            assert batch["token"].shape == (4, 12)
        real = [
            tokens[:length].tolist()
            for batch in batches
            for tokens, length, weight in zip(
                batch["token"], batch["length"], batch["weight"], strict=True
            )
            if weight
        ]
        expected = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
        assert sorted(real) == sorted(expected)
        contents = {frozenset(batch["token"][:, 0].tolist()) for batch in batches}
        orders.append((contents, numbers))
    assert (orders[0][0] != orders[1][0]) == shuffle  # other examples stand together
    assert (orders[0][1] != orders[1][1]) == shuffle
    assert (orders[0][1] != sorted(orders[0][1])) == shuffle


def test_any_batch_and_any_rows_of_it_alone(source):
    whole = an_epoch(source, 4)
    rows = np.array([3, 1])
    later = next(source.batches(4, 5, seed=3, shuffle=True, rows=rows).as_numpy_iterator())
    for name, values in later.items():
        np.testing.assert_array_equal(values, whole[5][name][rows])
    numbers = source.buckets(4, 5, seed=3, shuffle=True)
    assert next(numbers.as_numpy_iterator()) == buckets_in(source, 4)[5]


def test_buckets_without_examples_are_left_out_and_features_padded():
    source = ddl.data.bucketed(arrays(), (12, 15, 20))
    assert source.boundaries == (12,)
    assert source.element_spec["token"].shape == (20,)
    batch = an_epoch(source, 4)[0]
    assert (batch["token"][:, 12:] == 0).all()


def test_the_buckets_of_a_pipeline():
    source = ddl.data.bucketed(arrays(), BOUNDARIES)
    pipeline = BatchPipeline(source, 4, seed=3)
    iterator = buckets_of({"": pipeline}).iterator(2)
    assert [int(next(iterator)) for _ in range(3)] == buckets_in(source, 4)[2:5]
    assert buckets_of({"": pipeline, "other": pipeline}) is None
    assert buckets_of({"": BatchPipeline(arrays(), 4)}) is None
    pipeline.batches_per_update = 2
    assert buckets_of({"": pipeline}) is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ddl.data.bucketed(arrays(), ()), ConfigError, "positive and rising"),
        (lambda: ddl.data.bucketed(arrays(), (8, 4)), ConfigError, "positive and rising"),
        (lambda: ddl.data.bucketed(arrays(), range(1, 18)), ConfigError, "at most 16"),
        (
            lambda: ddl.data.bucketed(arrays(), (12,), features="token"),
            ConfigError,
            "features must be a list, got the text 'token'",
        ),
        (
            lambda: ddl.data.bucketed(arrays(), (4, 8)),
            DataError,
            r"must be at least 12, the length of example \d+, got 8",
        ),
        (
            lambda: ddl.data.bucketed(arrays(), (12,), features=("length",)),
            DataError,
            "features must name features .* got 'length'",
        ),
        (
            lambda: ddl.data.bucketed({"token": TOKENS, "length": LENGTHS + 1}, (20,)),
            DataError,
            "must be at most 12, the size of token",
        ),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
