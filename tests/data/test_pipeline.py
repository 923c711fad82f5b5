"""Batches of every strategy: the rows of `batch_indices`, in their documented places."""

import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, batch_indices
from ddl.data import pipeline as module
from ddl.step import replicas
from ddl.step.replicas import distributed_iterator
from tests.conftest import make_strategy
from tests.data.test_source import crop

UPDATES = 4
DEFAULT, ONE, TWO, FOUR = ("default", 1), ("one_device", 1), ("mirrored", 2), ("mirrored", 4)


def strategy_of(name: str, replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.get_strategy() if name == "default" else make_strategy(name, replicas)


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "double": random.normal(size=(22, 2)),
        "byte": random.integers(0, 255, (22, 3, 1)).astype(np.uint8),
        "label": np.arange(22, dtype=np.int32) - 5,
    }


def pipeline_of(source, size=8, accumulated=(1, 1), **kwargs):
    """Makes a pipeline of so many microbatches, and batches per update."""
    pipeline = BatchPipeline(source, size, microbatches=accumulated[0], **kwargs)
    pipeline.batches_per_update = accumulated[1]
    return pipeline


def updates(pipeline, strategy, first=(0,), count=UPDATES):
    """Returns the global batches of updates, [count · batches per update, B, …], for each `first`.

    Batches are put together from what each replica gets in each microbatch.
    """
    batches, size = pipeline.batches_per_update, pipeline.global_batch_size
    places = [(m, n) for n in range(batches) for m in range(pipeline.microbatches)]

    def examples(batch):
        return [pipeline.examples(batch, m, n) for m, n in places]

    @tf.function(autograph=False)
    def update(iterator):
        batch = pipeline.next_batch(iterator, strategy, tf.zeros([], tf.int64))
        found, together = strategy.run(examples, (batch,)), {}
        for name in pipeline.element_spec:
            parts = [strategy.experimental_local_results(each[name]) for each in found]
            together[name] = tf.concat([part for each in parts for part in each], 0)
        return together

    for begin in first:
        iterator = distributed_iterator(pipeline, strategy, begin)
        made = [update(iterator) for _ in range(count)]
        whole = {name: np.stack([each[name].numpy() for each in made]) for name in made[0]}
        yield {n: v.reshape(count * batches, size, *v.shape[2:]) for n, v in whole.items()}


def expected(pipeline, data, first=0, count=UPDATES):
    index, weight = batch_indices(
        first * pipeline.batches_per_update,
        count * pipeline.batches_per_update,
        num_examples=len(next(iter(data.values()))),
        global_batch_size=pipeline.global_batch_size,
        seed=pipeline.order_seed,
    )
    return {**{name: array[index] for name, array in data.items()}, "weight": weight}


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == values.tobytes(), name


CASES = [(DEFAULT, (1, 1)), (ONE, (1, 1)), (ONE, (2, 2)), (FOUR, (1, 1)), (FOUR, (2, 1))]
CASES += [(TWO, (2, 1)), (TWO, (1, 2)), (TWO, (2, 2))]


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("strategy", "accumulated"), CASES)
def test_every_strategy_gets_the_same_rows_in_the_same_places(strategy, accumulated, resident):
    """From the beginning and from a later update on; 3 batches are an epoch, the last padded."""
    data = arrays()
    pipeline = pipeline_of(Source(data), accumulated=accumulated, seed=3, resident=resident)
    assert pipeline.resident == resident
    assert pipeline.steps_per_epoch == (3 if accumulated[1] == 1 else 2)
    for first, found in zip((0, 5), updates(pipeline, strategy_of(*strategy), (0, 5)), strict=True):
        assert_same(found, expected(pipeline, data, first))


def decoded_source():
    """Examples that hold their own seeds."""
    return Source({"x": np.zeros([22, 2], np.float32), "label": np.arange(22)}, crop)


@pytest.mark.parametrize("kind", ["items", "decoded", "resident"])
def test_workers_read_their_own_rows(kind, monkeypatch):
    """Two workers of two replicas, one after the other, read what one process reads."""
    source = decoded_source() if kind == "decoded" else Source({"x": np.arange(22)})
    pipeline = pipeline_of(source, 8, (2, 2), seed=3, resident=kind == "resident")
    strategy = make_strategy("mirrored", 2)
    (whole,) = updates(pipeline, make_strategy("mirrored", 4))
    # [update, batch, microbatch, replica, rows of it, …]
    parts = {n: v.reshape(UPDATES, 2, 2, 4, 1, *v.shape[2:]) for n, v in whole.items()}
    for index in range(2):
        worker = types.SimpleNamespace(number=2, index=index, replicas_of_each=2)
        for each in (module, replicas):
            monkeypatch.setattr(each, "Workers", lambda _, worker=worker: worker)
        iterator = distributed_iterator(pipeline, strategy)
        for update in range(UPDATES):
            for name, each in next(iterator).items():
                part = parts["x" if name == "index" else name][update]
                for replica, own in enumerate(strategy.experimental_local_results(each)):
                    wanted = part[:, :, 2 * index + replica]
                    np.testing.assert_array_equal(own, wanted.reshape(own.shape))


def memory(name):
    """Returns a figure of this process's memory in bytes: "VmRSS", or its peak "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.parametrize(("resident", "copies"), [(True, 1), (False, 0)])
def test_arrays_are_copied_at_most_once(resident, copies):
    array = np.ones([160_000, 256], np.float32)  # 164 MB
    pipeline = pipeline_of(Source({"x": array}), 64, resident=resident)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = memory("VmRSS")
    for _ in updates(pipeline, make_strategy("one_device", 1)):
        pass
    assert memory("VmHWM") - before < (copies + 0.1) * array.nbytes
