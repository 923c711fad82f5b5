"""Tables of rows: the rows of the iterator, for many updates."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source
from ddl.data.pipeline import Batch
from ddl.random import batch_counter
from ddl.training.loop import row_tables
from ddl.training.loop.row_tables import RowTables
from tests.conftest import make_strategy


def pipeline_of(num_examples=22, **kwargs):
    return BatchPipeline(Source({"x": np.arange(num_examples)}), 8, seed=3, **kwargs)


@pytest.mark.parametrize(("kind", "replicas"), [("one_device", 1), ("mirrored", 2)])
@pytest.mark.parametrize("num_examples", [22, 1600])  # all batches full, or not
@pytest.mark.parametrize("place_dtype", [tf.int32, tf.int64])
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
    def from_table(rows, place, arrays):
        batch = Batch(rows, arrays, batch_counter(tf.zeros([], tf.int64)), place)
        found = strategy.run(microbatches, (batch,))
        return [strategy.experimental_local_results(each) for each in found]

    @tf.function(autograph=False)
    def from_iterator(iterator):
        batch = pipeline.next_batch(iterator, strategy, tf.zeros([], tf.int64))
        found = strategy.run(microbatches, (batch,))
        return [strategy.experimental_local_results(each) for each in found]

    arrays = pipeline.resident_arrays(strategy)
    for begin, end in [(5, 40), (0, 3), (100, 102)]:
        iterator = pipeline.iterator(strategy, begin)
        for update in range(begin, end):
            first, table = tables.at(update)
            assert ("weight" in table[""]) == (num_examples == 22)
            assert int(first) <= update < int(first) + 16
            place = tf.cast(update - first, place_dtype)
            found = from_table(table[""], place, arrays)
            np.testing.assert_array_equal(np.array(found), np.array(from_iterator(iterator)))
            assert tables.end_at(update + 1) == (update + 1 == int(first) + 16)


def test_each_resident_source_has_a_table_of_one_length():
    strategy = make_strategy("one_device", 1)
    pipelines = {"a": pipeline_of(), "b": pipeline_of(9), "c": pipeline_of(resident=False)}
    first, table = RowTables(pipelines, strategy).at(7)
    assert first.numpy() == 7
    assert set(table) == {"a", "b"}
    assert table["a"]["index"].shape == table["b"]["index"].shape == (1024, 8)


def test_large_updates_have_short_tables():
    source = Source({"x": np.zeros(10)})
    pipelines = {"": BatchPipeline(source, 1 << 20), "few": BatchPipeline(source, 4)}
    assert RowTables(pipelines, make_strategy("one_device", 1)).length == 16


def test_without_resident_arrays_there_is_no_table():
    tables = RowTables({"": pipeline_of(resident=False)}, make_strategy("one_device", 1))
    first, table = tables.at(5)
    assert (first.numpy(), table) == (0, {})
    assert not tables.end_at(6)
