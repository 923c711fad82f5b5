"""Batches of readers and arrays: the rows of `batch_indices`, in their documented places."""

import os
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, batch_indices, concatenate, stream
from ddl.data import pipeline as module
from ddl.step import replicas
from ddl.step.replicas import distributed_iterator
from tests.conftest import make_strategy
from tests.data.decoding import examples as decoded
from tests.data.files import READERS, ROWS

UPDATES = 3  # of two batches of 8: two epochs of 21 examples
ONE, TWO, FOUR = ("one_device", 1), ("mirrored", 2), ("mirrored", 4)


def pipeline_of(source, size=8, **kwargs):
    """Makes a pipeline of two microbatches, and two batches per update."""
    pipeline = BatchPipeline(source, size, microbatches=2, seed=3, **kwargs)
    pipeline.batches_per_update = 2
    return pipeline


def updates(pipeline, strategy):
    """Returns the global batches of all updates, [batches, B, …].

    Batches are put together from what each replica gets in each microbatch.
    """

    def examples(batch):
        return [pipeline.examples(batch, m, n) for n in range(2) for m in range(2)]

    @tf.function(autograph=False)
    def update(iterator):
        batch = pipeline.next_batch(iterator, strategy, tf.zeros([], tf.int64))
        found, together = strategy.run(examples, (batch,)), {}
        for name in pipeline.element_spec:
            parts = [strategy.experimental_local_results(each[name]) for each in found]
            together[name] = tf.concat([part for each in parts for part in each], 0)
        return together

    iterator = distributed_iterator(pipeline, strategy)
    made = [update(iterator) for _ in range(UPDATES)]
    whole = {name: np.stack([each[name].numpy() for each in made]) for name in made[0]}
    size = pipeline.global_batch_size
    return {n: v.reshape(2 * UPDATES, size, *v.shape[2:]) for n, v in whole.items()}


@pytest.mark.parametrize("reader", READERS)
def test_each_example_of_a_reader_comes_once_an_epoch(reader, folder):
    make, feature = READERS[reader]
    data = make(folder)
    values = [example[feature].tobytes() for example in decoded(data)]
    assert len({*values}) == len(values) == ROWS
    found = updates(pipeline_of(data), make_strategy(*TWO))
    index, weight = batch_indices(0, 6, num_examples=ROWS, global_batch_size=8, seed=3)
    np.testing.assert_array_equal(found["weight"], weight)
    read = [row.tobytes() for batch in found[feature] for row in batch]
    assert read == [values[number] for number in index.ravel()]
    assert sorted(read[:ROWS]) == sorted(values)


WORKERS = {
    "tf_records": READERS["tf_records"][0],
    "resident": lambda _: Source({"x": np.arange(ROWS)}),
    "stream": lambda _: stream(tf.data.Dataset.range(ROWS).map(lambda x: {"x": x})),
}


@pytest.mark.parametrize("make", WORKERS.values(), ids=WORKERS)
def test_workers_read_their_own_rows(make, folder, monkeypatch):
    """Two workers, one after the other, go on within an epoch of one process's run."""
    pipeline, strategy = pipeline_of(make(folder)), make_strategy(*TWO)
    whole = updates(pipeline, make_strategy(*FOUR))
    # [update, batch, microbatch, replica, rows of it, …]
    parts = {n: v.reshape(UPDATES, 2, 2, 4, 1, *v.shape[2:]) for n, v in whole.items()}
    for index in range(2):
        worker = types.SimpleNamespace(number=2, index=index, replicas_of_each=2)
        for each in (module, replicas):
            monkeypatch.setattr(each, "Workers", lambda _, worker=worker: worker)
        iterator = distributed_iterator(pipeline, strategy, 1)
        for update in range(1, UPDATES):
            for name, each in next(iterator).items():
                part = parts["x" if name == "index" else name][update]
                for replica, own in enumerate(strategy.experimental_local_results(each)):
                    wanted = part[:, :, 2 * index + replica]
                    np.testing.assert_array_equal(own, wanted.reshape(own.shape))


@pytest.mark.parametrize("make", WORKERS.values(), ids=WORKERS)
def test_data_sets_are_endless(make, folder):
    """Before each batch of others, tf.distribute asks whether they have ended."""
    dataset, _ = pipeline_of(make(folder)).rows(make_strategy(*ONE))
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY


def test_threads_are_as_many_as_the_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 9})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    pipeline = pipeline_of(Source({"x": np.zeros([8, 10_000])}), resident=False)
    dataset, _ = pipeline.rows(make_strategy(*ONE))
    assert dataset.options().threading.private_threadpool_size == 3


def memory(name):
    """Returns a figure of this process's memory in bytes: "VmRSS", or its peak "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.parametrize(("resident", "copies"), [(True, 1), (False, 0)])
def test_arrays_are_copied_at_most_once(resident, copies):
    array = np.ones([280_000, 256], np.float32)  # 287 MB, too large to be copied unasked
    for rows in (array[:64], array):  # the first ones take TensorFlow's own memory
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = memory("VmRSS")
        source = Source({"x": rows}) if resident else concatenate([{"x": rows}, {"x": rows[:9]}])
        updates(pipeline_of(source, 64, resident=resident), make_strategy(*ONE))
    assert memory("VmHWM") - before < (copies + 0.1) * array.nbytes
