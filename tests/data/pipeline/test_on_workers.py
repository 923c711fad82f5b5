"""Batches as workers of parameter servers read them, without the servers."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data.pipeline import BatchPipeline, WorkerBatches
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.data import every_source, test_records

COUNT, BATCH = 5, 4  # an epoch has 3 batches, or 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    every_source.write(folder)
    return folder


def numbers(folder):
    (folder / "numbers").mkdir(exist_ok=True)
    return test_records.written(folder / "numbers")


def drawing(folder):
    """Records whose decoding draws by the seed; small enough to be read by block elsewhere."""
    source = ddl.data.RecordSource(numbers(folder), test_records.decode)
    assert source._records.blocks is not None
    return source


def listed(folder):
    """Some of the images, and some of the records, one after the other."""
    parts = [every_source.image_folder(folder), every_source.records(folder)]
    return ddl.data.concatenation([ddl.data.subset(each, first=7) for each in parts])


class Squares(ddl.data.IndexedSource):
    """Computed by TensorFlow's operations."""

    def __len__(self):
        return 5000  # more than an epoch's order is sorted for

    @property
    def element_spec(self):
        return {"x": tf.TensorSpec([], tf.int64)}

    def gather(self, indices):
        return {"x": indices**2}


READ = {
    "records": every_source.records,
    "image_folder": every_source.image_folder,
    "drawing": drawing,
    "listed": listed,
    "squares": lambda folder: Squares(),
}
SENT = {
    "arrays": every_source.arrays,
    "npz": every_source.npz,
    "csv_table": every_source.csv_table,
}


def on_worker(batches, first):
    """Returns batches as a worker's function makes them."""

    @tf.function(autograph=False)
    def read(arrays, number):
        return batches.batch(arrays, number).rows

    return [read(batches.arrays, tf.constant(first + n, tf.int64)) for n in range(COUNT)]


@pytest.mark.parametrize("name", [*READ, *SENT])
@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_read_the_bits_of_other_strategies(folder, name, shuffle):
    source = {**READ, **SENT}[name](folder)
    pipeline = BatchPipeline(source, BATCH, seed=3, shuffle=shuffle, resident=False)
    batches = WorkerBatches(pipeline)
    assert bool(batches.arrays) == (name in SENT)
    for first in (0, 4, 10_007):
        iterator = pipeline.iterator(make_strategy("one_device", 1), first)
        expected = [next(iterator) for _ in range(COUNT)]
        for found, theirs in zip(on_worker(batches, first), expected, strict=True):
            assert found.keys() == theirs.keys()
            for feature, values in found.items():
                assert values.dtype == theirs[feature].dtype
                np.testing.assert_array_equal(values, theirs[feature])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (every_source.lines, "but RandomAccessSource reads them in Python .operation PyFunc"),
        (every_source.windows, "but _Windows reads files that are mapped into the chief's memory"),
        (every_source.damaged, "but _Tolerant reads them in Python"),
        (every_source.npy, "(in Python|mapped into the chief's memory)"),
        (every_source.mixture, "got Mixture. Write the data into TFRecord files"),
        (every_source.stream, "got StreamSource. Write the data into TFRecord files"),
        (every_source.generator, "got EndlessSource. Write the data into TFRecord files"),
    ],
)
def test_data_that_need_python_on_the_worker_are_refused(folder, make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        WorkerBatches(BatchPipeline(make(folder), BATCH))
    assert "TFRecord" in str(caught.value)
    assert "multi_worker_mirrored" in str(caught.value)


def test_an_object_of_the_chief_is_refused(folder):
    keys = tf.lookup.KeyValueTensorInitializer(tf.range(22), 2 * tf.range(22))
    table = tf.lookup.StaticHashTable(keys, -1)

    def decode(record, seed):
        number = tf.strings.to_number(record, tf.int32)
        return {"x": table.lookup(tf.ensure_shape(number, []))}

    source = ddl.data.RecordSource(numbers(folder), decode)
    with pytest.raises(ConfigError, match="RecordSource reads an object of the chief's memory"):
        WorkerBatches(BatchPipeline(source, BATCH))
