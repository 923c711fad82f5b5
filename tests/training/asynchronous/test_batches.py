"""Batches as workers of parameter servers read them, without the servers."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source
from ddl.errors import ConfigError
from ddl.random import batch_counter
from ddl.training.asynchronous import batches as module
from ddl.training.asynchronous.batches import WorkerBatches
from tests.conftest import make_strategy


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_read_the_bits_of_other_strategies(shuffle, weighted):
    data = {"byte": np.arange(66, dtype="u1").reshape(22, 3), "swapped": np.arange(22, dtype=">i2")}
    if weighted:
        data["weight"] = np.linspace(0.1, 2, 22)
    pipeline = BatchPipeline(Source(data), 8, seed=3, shuffle=shuffle, resident=False)
    batches = WorkerBatches(pipeline)

    @tf.function(autograph=False)
    def read(worker, rows, place, number):
        return batches.batch(worker, batches.received(rows), place, number)

    worker = iter(batches.dataset())
    rows = batches.rows_of(2, 5)
    iterator = pipeline.iterator(make_strategy("one_device", 1), 2)
    for place in range(5):
        number = tf.constant(2 + place, tf.int64)
        batch, theirs = read(worker, rows, tf.constant(place, tf.int64), number), next(iterator)
        np.testing.assert_array_equal(batch.counter, batch_counter(number))
        assert batch.rows.keys() == theirs.keys()
        for name, values in batch.rows.items():
            assert values.dtype == theirs[name].dtype
            np.testing.assert_array_equal(values, theirs[name])


REFUSED = [
    ({"x": ["a"]}, "they cannot read Arrays. Pass arrays of numbers"),
    ([{"x": 1}], "they cannot read list. Pass arrays of numbers"),
    ({"x": np.zeros(10)}, "they cannot read 0.0 GB of arrays. .*multi_worker_mirrored"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_what_workers_cannot_read_is_refused(data, message, monkeypatch):
    monkeypatch.setattr(module, "_SENT_UP_TO_BYTES", 79)
    with pytest.raises(ConfigError, match=message):
        WorkerBatches(BatchPipeline(Source(data), 4))
