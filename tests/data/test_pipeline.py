"""Batches of every strategy: the rows of `batch_indices`, in their documented places."""

import types

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, batch_indices
from ddl.data import pipeline as module
from ddl.errors import ConfigError
from tests.conftest import LikeGpus, make_strategy
from tests.data.test_source import crop

UPDATES = 4
STRATEGIES = [("default", 1), ("one_device", 1), ("mirrored", 2), ("mirrored", 4)]


def strategy_of(name: str, replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.get_strategy() if name == "default" else make_strategy(name, replicas)


def arrays(num_examples: int = 22) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "double": random.normal(size=(num_examples, 2)),
        "byte": random.integers(0, 255, (num_examples, 3, 1)).astype(np.uint8),
        "label": np.arange(num_examples, dtype=np.int32) - 5,
        "word": random.integers(0, 2**32, num_examples).astype(np.uint32),
        "swapped": np.arange(num_examples, dtype=">i2"),
        "truth": random.normal(size=num_examples) > 0,
        "half": random.normal(size=num_examples).astype(tf.bfloat16.as_numpy_dtype),
    }


def updates(pipeline, strategy, first=(0,), count=UPDATES):
    """Returns the global batches of updates, [count · batches per update, B, …], for each `first`.

    Batches are put together from what each replica gets in each microbatch.
    """
    batches, microbatches = pipeline.batches_per_update, pipeline.microbatches

    def examples(batch):
        places = [(m, n) for n in range(batches) for m in range(microbatches)]
        return [pipeline.examples(batch, m, n) for m, n in places]

    @tf.function(autograph=False)
    def update(iterator):
        batch = pipeline.next_batch(iterator, strategy, tf.zeros([], tf.int64))
        found = strategy.run(examples, (batch,))
        return {
            name: tf.concat(
                [
                    part
                    for each in found
                    for part in strategy.experimental_local_results(each[name])
                ],
                0,
            )
            for name in pipeline.element_spec
        }

    results = []
    for begin in first:
        iterator = pipeline.iterator(strategy, begin)
        made = [update(iterator) for _ in range(count)]
        size = pipeline.global_batch_size
        results.append(
            {
                name: np.stack([each[name].numpy() for each in made]).reshape(
                    count * batches, size, *made[0][name].shape[1:]
                )
                for name in made[0]
            }
        )
    return results


def expected(pipeline, data, first=0, count=UPDATES):
    index, weight = batch_indices(
        first * pipeline.batches_per_update,
        count * pipeline.batches_per_update,
        num_examples=len(next(iter(data.values()))),
        global_batch_size=pipeline.global_batch_size,
        seed=pipeline.order_seed,
        shuffle=pipeline.shuffle,
    )
    return {**{name: array[index] for name, array in data.items()}, "weight": weight}


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype.newbyteorder("="), name
        assert found[name].shape == values.shape, name
        assert found[name].tobytes() == values.astype(found[name].dtype).tobytes(), name


def pipeline_of(source, size=8, accumulated=(1, 1), **kwargs):
    microbatches, batches = accumulated
    pipeline = BatchPipeline(source, size, microbatches=microbatches, **kwargs)
    pipeline.batches_per_update = batches
    return pipeline


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("strategy", "accumulated"),
    [(each, both) for each in STRATEGIES for both in [(1, 1), (2, 2)]]
    + [(("mirrored", 2), (2, 1)), (("mirrored", 2), (1, 2))],
)
def test_every_strategy_gets_the_same_rows_in_the_same_places(strategy, accumulated, resident):
    """From the beginning and from a later update on; 3 batches are an epoch, the last padded."""
    data = arrays()
    pipeline = pipeline_of(Source(data), accumulated=accumulated, seed=3, resident=resident)
    assert pipeline.resident == resident
    for first, found in zip((0, 5), updates(pipeline, strategy_of(*strategy), (0, 5)), strict=True):
        assert_same(found, expected(pipeline, data, first))


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("size", [11, 12])  # all batches full, or not
@pytest.mark.parametrize("resident", [True, False])
def test_gpus_get_the_same_rows_without_int32_or_weights_of_1(size, resident):
    strategy, data = LikeGpus(2), arrays()
    pipeline = BatchPipeline(Source(data), 2 * size, seed=3, resident=resident)
    (found,) = updates(pipeline, strategy)
    assert_same(found, expected(pipeline, data))
    (sent,) = strategy.distributed
    assert not {tf.int32, tf.uint32} & {spec.dtype for spec in sent.element_spec.values()}
    assert ("weight" in sent.element_spec) == (size == 12)


@pytest.mark.parametrize("kind", ["arrays", "items", "decoded"])
def test_text_and_other_examples_are_streamed(kind):
    data = {"text": np.array([f"{i}\0é" for i in range(22)], object), "number": np.arange(22)}
    items = [{name: array[i] for name, array in data.items()} for i in range(22)]
    source = Source(data if kind == "arrays" else items, same if kind == "decoded" else None)
    pipeline = pipeline_of(source, accumulated=(2, 2), seed=1)
    (found,) = updates(pipeline, make_strategy("mirrored", 2))
    wanted = expected(pipeline, data)
    assert [text.decode() for text in found["text"].flat] == wanted["text"].ravel().tolist()
    for name in ("number", "weight"):
        np.testing.assert_array_equal(found[name], wanted[name])


def same(item, seed):
    return item


@pytest.mark.parametrize("sizes", [(3, 8), (5, 1), (1, 4), (8, 8), (1300, 500)])
def test_sizes_of_data_and_batch(sizes):
    num_examples, size = sizes
    data = {"x": np.arange(num_examples)}
    for resident in (True, False):
        pipeline = BatchPipeline(Source(data), size, resident=resident)
        assert pipeline.steps_per_epoch == -(-num_examples // size)
        assert pipeline.count_examples() == pipeline.num_examples == num_examples
        assert pipeline.always_full == (num_examples % size == 0)
        (found,) = updates(pipeline, make_strategy("one_device", 1), (2,), 7)
        assert_same(found, expected(pipeline, data, 2, 7))


def test_an_epoch_of_updates_of_several_batches_is_rounded_up():
    pipeline = pipeline_of(Source({"x": np.arange(22)}), accumulated=(1, 2))
    assert pipeline.steps_per_epoch == 2


@pytest.mark.parametrize("kind", [True, False, "items", "decoded"])
def test_weights_of_examples_count_and_padding_has_none(kind):
    data = {"label": np.arange(10), "weight": np.linspace(0.1, 2, 10)}
    items = [{"label": i, "weight": float(data["weight"][i])} for i in range(10)]
    source = Source(items, same if kind == "decoded" else None)
    if isinstance(kind, bool):
        source = Source(data)
    pipeline = BatchPipeline(source, 8, resident=kind is True)
    assert not pipeline.always_full
    assert not BatchPipeline(source, 5).always_full
    assert pipeline.element_spec["weight"].dtype == tf.float32
    (found,) = updates(pipeline, make_strategy("mirrored", 2), count=2)
    labels, weights = found["label"].ravel(), found["weight"].ravel()
    assert weights.dtype == np.float32
    assert weights.tolist() == [*data["weight"].astype(np.float32)[labels[:10]], *[0.0] * 6]


def test_a_seed_of_the_order_apart_from_that_of_the_layers():
    data = {"x": np.arange(30)}
    pipeline = BatchPipeline(Source(data), 10, seed=5, order_seed=0)
    assert (pipeline.seed, pipeline.order_seed) == (5, 0)
    strategy = make_strategy("one_device", 1)
    (found,) = updates(pipeline, strategy)
    (other,) = updates(BatchPipeline(Source(data), 10, seed=0), strategy)
    assert_same(found, other)
    (stored,) = updates(BatchPipeline(Source(data), 10, shuffle=False), strategy, count=3)
    assert stored["x"].ravel().tolist() == list(range(30))


def decoded_source(num_examples=22):
    """Examples that hold their own seeds."""
    data = {"x": np.zeros([num_examples, 2], np.float32), "label": np.arange(num_examples)}
    return Source(data, crop)


def seeds(pipeline, strategy, first=0, count=UPDATES):
    """Returns the examples' seeds, and what was drawn by them, by epoch and example."""
    (found,) = updates(pipeline, strategy, (first,), count)
    batches = first * pipeline.batches_per_update + np.arange(len(found["label"]))
    epochs = batches // -(-pipeline.num_examples // pipeline.global_batch_size)
    made = {}
    for epoch, *rows in zip(epochs, *(found[n] for n in ("label", "seed", "x")), strict=True):
        for label, seed, x in zip(*rows, strict=True):
            value = (*seed.tolist(), *x.tolist())
            assert made.setdefault((int(epoch), int(label)), value) == value  # padding, too
    return made


def test_an_examples_seed_depends_on_run_epoch_and_example_alone():
    one = make_strategy("one_device", 1)
    reference = seeds(BatchPipeline(decoded_source(), 8, seed=1), one, 0, 12)
    assert len(set(reference.values())) == len(reference) == 4 * 22
    assert len({value[:2] for value in reference.values()}) == 4 * 22
    for strategy, size, accumulated, first in [
        (one, 22, (1, 1), 0),
        (one, 5, (1, 3), 1),
        (make_strategy("mirrored", 2), 8, (2, 2), 1),
        (make_strategy("mirrored", 4), 4, (1, 1), 3),
    ]:
        pipeline = pipeline_of(decoded_source(), size, accumulated, seed=1)
        found = seeds(pipeline, strategy, first)
        assert found == {key: reference[key] for key in found}
        assert len(found) > 10
    other = seeds(BatchPipeline(decoded_source(), 8, seed=2), one)
    assert not set(other.values()) & set(reference.values())


@pytest.mark.parametrize("kind", ["items", "decoded", "resident"])
def test_workers_read_their_own_rows(kind, monkeypatch):
    """Two workers of two replicas, one after the other, read what one process reads."""
    source = decoded_source() if kind == "decoded" else Source({"x": np.arange(22)})
    pipeline = pipeline_of(source, 8, (2, 2), seed=3, resident=kind == "resident")
    strategy = make_strategy("mirrored", 2)
    (whole,) = updates(pipeline, make_strategy("mirrored", 4))
    found = []
    for index in range(2):
        worker = types.SimpleNamespace(number=2, index=index, replicas_of_each=2)
        monkeypatch.setattr(module, "Workers", lambda _, worker=worker: worker)
        iterator = pipeline.iterator(strategy)
        for _ in range(UPDATES):
            rows = next(iterator)
            if kind == "resident":
                rows = {"x": rows["index"], "weight": rows["weight"]}
            found.append({n: strategy.experimental_local_results(r) for n, r in rows.items()})
    for name, values in whole.items():
        # [update, batch, microbatch, replica, rows of it, …]
        parts = values.reshape(UPDATES, 2, 2, 4, 1, *values.shape[2:])
        for number, each in enumerate(found):
            worker, update = divmod(number, UPDATES)
            for replica, rows in enumerate(each[name]):
                own = parts[update, :, :, 2 * worker + replica]
                np.testing.assert_array_equal(rows.numpy(), own.reshape(4, *values.shape[2:]))


@pytest.mark.parametrize("kind", ["arrays", "decoded"])
def test_an_evaluation_repeats_the_first_epoch(kind):
    source = decoded_source() if kind == "decoded" else Source({"x": np.arange(22)})
    iterator = BatchPipeline(source, 8, seed=3).iterator(
        make_strategy("one_device", 1), repeats=True
    )
    made = [next(iterator) for _ in range(6)]
    for first, second in zip(made[:3], made[3:], strict=True):
        for name, values in first.items():
            np.testing.assert_array_equal(values, second[name])
    first = next(iter(made[0].values()))
    assert (first.numpy() != next(iter(made[1].values())).numpy()).any()


@pytest.mark.parametrize("count", [5, 30])
@pytest.mark.parametrize("kind", ["arrays", "items", "decoded"])
def test_the_first_examples_are_those_of_the_first_batch(kind, count):
    data = {"x": np.arange(22, dtype=">f4"), "label": np.arange(22)}
    items = [{name: array[i] for name, array in data.items()} for i in range(22)]
    source = Source(items if kind == "items" else data, crop if kind == "decoded" else None)
    pipeline = BatchPipeline(source, count, seed=4, resident=False)
    found = pipeline.first_examples(count)
    (batches,) = updates(pipeline, make_strategy("one_device", 1), count=1)
    assert_same(
        {name: each.numpy() for name, each in found.items()} | {"weight": batches["weight"][0]},
        {name: values[0] for name, values in batches.items()},
    )


@pytest.mark.parametrize("resident", [True, False])
def test_arrays_are_neither_copied_nor_constants_of_the_graph(resident):
    array = np.random.default_rng(0).integers(0, 99, (2_000, 10))
    pipeline = BatchPipeline(Source({"x": array}), 10, resident=resident)
    assert np.shares_memory(pipeline.source.arrays["x"], array)
    strategy = make_strategy("one_device", 1)

    @tf.function
    def step(iterator):
        batch = pipeline.next_batch(iterator, strategy, tf.zeros([], tf.int64))
        return strategy.run(pipeline.examples, args=(batch,))["x"]

    graph = step.get_concrete_function(pipeline.iterator(strategy)).graph
    assert graph.as_graph_def().ByteSize() < 50_000


def test_only_the_rows_of_few_batches_are_read_ahead():
    read = []

    class Counted:
        def __len__(self):
            return 100_000

        def rows(self, indices):
            read.append(len(indices))
            return {"x": indices}

    iterator = BatchPipeline(Source(Counted()), 10).iterator(make_strategy("one_device", 1))
    next(iterator)
    assert read[0] == 1  # the form of the first item
    assert set(read[1:]) == {10}
    assert len(read) < 50


@pytest.mark.parametrize("source", [Source({"x": np.arange(10)}), decoded_source()])
def test_no_tuner_runs_and_maps_have_several_calls_under_way(source, monkeypatch):
    """A tuner would be waited for at the end. There are as many calls as threads."""
    monkeypatch.setattr(module, "iterator_of", lambda dataset, strategy: dataset)
    options = BatchPipeline(source, 4).iterator(make_strategy("mirrored", 2)).options()
    assert options.autotune.enabled is False
    assert options.threading.private_threadpool_size >= 8


def test_impossible_batch_sizes_are_refused():
    with pytest.raises(ConfigError, match="from 1 to .* got 0. Correct GLOBAL_BATCH_SIZE"):
        BatchPipeline(Source({"x": [1]}), 0)
