"""Tables of rows: the rows of the iterator, for many updates."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source
from ddl.data.batch import Batch
from ddl.random import batch_counter
from ddl.training.loop import row_tables
from ddl.training.loop.row_tables import RowTables
from tests.conftest import make_strategy


def pipeline_of(num_examples=22, **kwargs):
    return BatchPipeline(Source({"x": np.arange(num_examples)}), 8, seed=3, **kwargs)


CASES = [("one_device", 1, 1600, tf.int64), ("mirrored", 2, 22, tf.int32)]  # full batches, or not


@pytest.mark.parametrize(("kind", "replicas", "num_examples", "place_dtype"), CASES)
def test_tables_hold_the_rows_of_the_iterator(
    kind, replicas, num_examples, place_dtype, monkeypatch
):
    """Across three tables, and after a jump to an earlier and a later update."""
    monkeypatch.setattr(row_tables, "_MOST", 16)
    strategy = make_strategy(kind, replicas)
    pipeline = pipeline_of(num_examples, microbatches=2)
    pipeline.batches_per_update = 2
    tables = RowTables({"": pipeline}, strategy)
    assert tables.length == 16

    def microbatches(batch):
        return [pipeline.examples(batch, m, n)["x"] for n in (0, 1) for m in (0, 1)]

    @tf.function(autograph=False)
    def examples(batch):
        found = strategy.run(microbatches, (batch,))
        return [strategy.experimental_local_results(each) for each in found]

    arrays = pipeline.resident_arrays(strategy)
    counter = batch_counter(tf.zeros([], tf.int64))
    for begin, end in [(5, 40), (0, 3), (100, 102)]:
        iterator = pipeline.iterator(strategy, begin)
        for update in range(begin, end):
            first, table = tables.at(update)
            assert ("weight" in table[""]) == (num_examples == 22)
            assert int(first) <= update < int(first) + 16
            place = tf.cast(update - first, place_dtype)
            found = examples(Batch(table[""], arrays, counter, place))
            np.testing.assert_array_equal(found, examples(Batch(next(iterator), arrays, counter)))
            assert tables.end_at(update + 1) == (update + 1 == int(first) + 16)


def test_each_resident_source_has_a_table_of_one_length():
    one, streamed = make_strategy("one_device", 1), pipeline_of(resident=False)
    tables = RowTables({"a": pipeline_of(), "b": pipeline_of(9), "c": streamed}, one)
    first, table = tables.at(7)
    assert (first.numpy(), set(table)) == (7, {"a", "b"})
    assert table["a"]["index"].shape == table["b"]["index"].shape == (1024, 8)
    large = BatchPipeline(Source({"x": np.zeros(10)}), 1 << 20)
    assert RowTables({"a": pipeline_of(), "large": large}, one).length == 16
    none = RowTables({"": streamed}, one)
    assert none.at(5)[1] == {}
    assert not none.end_at(6)
