import numpy as np
import pytest
import tensorflow as tf
from ddl.data.pipeline.datasets import finished

from ddl.data import ArraySource, BatchPipeline, RandomAccessSource, StreamSource
from ddl.data.pipeline import resident as resident_data
from ddl.errors import ConfigError
from tests.conftest import LikeGpus, for_every_strategy, make_strategy
from tests.data.host_batches import host_dataset


def source_of_all_dtypes(num_examples=50):
    """Features whose packing into words differs, with odd sizes among them."""
    random = np.random.default_rng(0)

    def array(shape, dtype):
        return random.integers(0, 100, (num_examples, *shape)).astype(dtype)

    return ArraySource(
        image=array([3, 3, 1], np.uint8),
        label=np.arange(num_examples),
        label_32=np.arange(num_examples, dtype=np.int32) - 25,
        byte=array([], np.uint8),
        signed=array([5], np.int8),
        short=array([3], np.int16),
        unsigned=array([2, 2], np.uint64),
        word=array([2], np.uint32),
        truth=array([2], np.int64) > 50,
        half=array([3], np.float16),
        double=random.normal(size=(num_examples, 2)),
    )


def run_steps(pipeline, strategy, steps, first_batch=0):
    """For each step the replicas' examples, one after the other, from one loop on the device."""
    spec = pipeline.element_spec

    @tf.function(autograph=False)
    def loop(iterator):
        def body(step, rows):
            batch = pipeline.next_batch(iterator, strategy, tf.cast(step, tf.int64))
            batch = strategy.run(pipeline.examples, args=(batch,))
            written = {}
            for name, array in rows.items():
                parts = strategy.experimental_local_results(batch[name])
                written[name] = array.write(step, tf.concat(parts, axis=0))
            return step + 1, written

        empty = {name: tf.TensorArray(spec[name].dtype, steps) for name in spec}
        _, rows = tf.while_loop(lambda step, _: step < steps, body, (0, empty))
        return {name: array.stack() for name, array in rows.items()}

    result = loop(pipeline.iterator(strategy, first_batch))
    return {name: values.numpy() for name, values in result.items()}


def host_batches(pipeline, steps, first_batch=0):
    batches = list(host_dataset(pipeline, first_batch).take(steps).as_numpy_iterator())
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(first, second):
    assert set(first) == set(second)
    for name, values in first.items():
        assert values.dtype == second[name].dtype, name
        np.testing.assert_array_equal(values, second[name], err_msg=name)


@for_every_strategy
@pytest.mark.parametrize("resident", [True, False])
def test_every_strategy_gets_the_same_rows_in_the_same_order(strategy, resident):
    pipeline = BatchPipeline(source_of_all_dtypes(), 12, seed=3, resident=resident)
    # 5 batches an epoch, the last with 2 rows: from the third on, into the next epoch.
    assert_same(run_steps(pipeline, strategy, 6, 2), host_batches(pipeline, 6, 2))


@pytest.mark.parametrize("resident", [True, False])
def test_the_default_strategy(resident):
    pipeline = BatchPipeline(source_of_all_dtypes(), 12, seed=3, resident=resident)
    strategy = tf.distribute.get_strategy()
    assert_same(run_steps(pipeline, strategy, 3, 4), host_batches(pipeline, 3, 4))


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("batch_size", [10, 12])  # all batches full, or not
def test_a_distributed_iterator_sends_neither_int32_nor_weights_of_1(batch_size):
    strategy = LikeGpus(2)
    pipeline = BatchPipeline(source_of_all_dtypes(), batch_size, seed=3, resident=False)
    assert_same(run_steps(pipeline, strategy, 6, 2), host_batches(pipeline, 6, 2))
    (sent,) = strategy.distributed
    assert not {tf.int32, tf.uint32} & {spec.dtype for spec in sent.element_spec.values()}
    assert ("weight" in sent.element_spec) == (batch_size == 12)


def test_batches_hold_what_the_source_holds():
    source = source_of_all_dtypes()
    batches = host_batches(BatchPipeline(source, 50, seed=1), 1)
    order = batches["label"][0]
    assert sorted(order) == list(range(50))
    for name, array in source.features.items():
        np.testing.assert_array_equal(batches[name][0], array[order])


def test_resident_arrays_lie_on_the_replicas_own_devices():
    pipeline = BatchPipeline(source_of_all_dtypes(), 8, resident=True)
    strategy = make_strategy("mirrored", 4)
    image = pipeline.resident_arrays(strategy)["image"]
    devices = [part.device for part in strategy.experimental_local_results(image)]
    assert [device[-5:] for device in devices] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert pipeline.resident_arrays(strategy)["image"] is image


@pytest.mark.parametrize("packing", [resident_data.HOST, resident_data.GPU], ids=["host", "gpu"])
def test_every_packing_gives_the_same_batches(packing, monkeypatch):
    monkeypatch.setattr(resident_data, "packing_for", lambda strategy: packing)
    strategy = make_strategy("mirrored", 2)
    pipeline = BatchPipeline(source_of_all_dtypes(), 12, seed=3, resident=True)
    placed = pipeline.resident_arrays(strategy)["label_32"]
    expected = tf.int32 if packing is resident_data.HOST else tf.int64
    assert {part.dtype for part in strategy.experimental_local_results(placed)} == {expected}
    assert_same(run_steps(pipeline, strategy, 6, 2), host_batches(pipeline, 6, 2))


@pytest.mark.parametrize("resident", [True, False])
def test_weights_of_examples_count_and_padding_has_none(resident):
    weight = np.linspace(0.1, 2, 10)
    source = ArraySource(label=np.arange(10), weight=weight)
    pipeline = BatchPipeline(source, 8, resident=resident)
    assert not pipeline.always_full
    assert not BatchPipeline(source, 5).always_full
    batches = run_steps(pipeline, make_strategy("mirrored", 2), 2)
    labels, weights = batches["label"].ravel(), batches["weight"].ravel()
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights[:10], weight.astype(np.float32)[labels[:10]])
    assert weights[10:].tolist() == [0] * 6


def test_always_full():
    assert BatchPipeline(ArraySource(x=np.arange(12)), 4).always_full
    assert not BatchPipeline(ArraySource(x=np.arange(13)), 4).always_full
    assert not BatchPipeline(ArraySource(x=np.arange(3)), 6).always_full


def test_a_batch_larger_than_the_data_set():
    pipeline = BatchPipeline(ArraySource(x=np.arange(3)), 8)
    assert pipeline.steps_per_epoch == 1
    batches = run_steps(pipeline, make_strategy("mirrored", 4), 2)
    for rows, weights in zip(batches["x"], batches["weight"], strict=True):
        assert weights.tolist() == [1] * 3 + [0] * 5
        assert sorted(rows[:3]) == [0, 1, 2]


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_are_split_in_the_same_way(replicas, shuffle):
    data = tf.data.Dataset.range(10).map(lambda x: {"x": x})
    pipeline = BatchPipeline(StreamSource(data), 4, shuffle=shuffle)
    batches = run_steps(pipeline, make_strategy("mirrored", replicas), 4, 1)
    assert_same(batches, host_batches(pipeline, 4, 1))
    if shuffle:
        return
    assert batches["x"].tolist() == [[4, 5, 6, 7], [8, 9, 8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_looked_up_examples_come_in_the_order_of_arrays():
    stored = np.arange(40, dtype=np.float32)
    looked_up = BatchPipeline(RandomAccessSource(lambda i: {"x": stored[i]}, 40), 8, seed=2)
    in_memory = BatchPipeline(ArraySource(x=stored), 8, seed=2)
    assert not looked_up.resident
    assert in_memory.resident
    strategy = make_strategy("mirrored", 2)
    assert_same(run_steps(looked_up, strategy, 6), run_steps(in_memory, strategy, 6))


def test_what_can_reside():
    text = ArraySource(x=np.array(["a", "b"]))
    assert not BatchPipeline(text, 2).resident
    with pytest.raises(ConfigError, match="ArraySource with text"):
        BatchPipeline(text, 2, resident=True)
    with pytest.raises(ConfigError, match="StreamSource"):
        BatchPipeline(
            StreamSource(tf.data.Dataset.range(4).map(lambda x: {"x": x})), 2, resident=True
        )


def test_large_arrays_stay_on_the_host(monkeypatch):
    source = ArraySource(x=np.zeros(1000, np.uint8))
    monkeypatch.setattr("ddl.data.pipeline.resident._RESIDENT_UP_TO_BYTES", 999)
    assert not BatchPipeline(source, 10).resident
    assert BatchPipeline(source, 10, resident=True).resident
    monkeypatch.setattr("ddl.data.pipeline.resident._RESIDENT_UP_TO_BYTES", 1000)
    assert BatchPipeline(source, 10).resident


def test_arrays_are_no_constants_of_the_graph():
    source = ArraySource(x=np.random.default_rng(0).integers(0, 99, (20_000, 10)))
    for resident in (True, False):
        pipeline = BatchPipeline(source, 10, resident=resident)
        strategy = make_strategy("one_device", 1)

        @tf.function
        def step(iterator, pipeline=pipeline, strategy=strategy):
            batch = pipeline.next_batch(iterator, strategy, tf.zeros([], tf.int64))
            return strategy.run(pipeline.examples, args=(batch,))["x"]

        graph = step.get_concrete_function(pipeline.iterator(strategy)).graph
        assert graph.as_graph_def().ByteSize() < 100_000


def test_no_tuner_runs_and_none_is_woken_by_a_step(strategy):
    """A tuner would be waited for at the end of a run; a data set of each device needs a thread."""
    iterator = BatchPipeline(ArraySource(x=np.arange(10)), 4).iterator(strategy)
    assert not isinstance(iterator, tf.distribute.DistributedIterator)
    assert iterator._dataset.options().autotune.enabled is False


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("first_batch", [0, 1234])
@pytest.mark.parametrize(
    ("examples", "microbatches"),
    [(5001, 1), (5001, 2), (1000, 1), (1000, 2)],  # in large sets keys are not sorted
)
def test_following_batches_are_those_of_the_iterator(first_batch, shuffle, examples, microbatches):
    """Over the end of an epoch, with padding; on two replicas microbatches are arranged."""
    strategy = make_strategy("mirrored", 2)
    source = ArraySource(x=np.arange(examples))
    arguments = {"seed": 3, "shuffle": shuffle, "microbatches": microbatches}
    pipeline = BatchPipeline(source, 128, **arguments)
    assert pipeline.orders_in_graph(strategy)
    iterator = pipeline.iterator(strategy, first_batch)
    following = tf.function(lambda batch: pipeline.batches_from(batch, strategy))
    batch, last = first_batch, first_batch + 2 * pipeline.steps_per_epoch
    while batch < last:
        made = following(tf.constant(batch, tf.int64))
        for number in range(len(made["index"])):
            given = next(iterator)
            assert given.keys() == made.keys()
            for name, values in given.items():
                np.testing.assert_array_equal(made[name][number], values)
        batch += len(made["index"])


def test_a_loop_holds_no_weights_that_are_all_one():
    strategy = make_strategy("one_device", 1)
    for examples, held in ((128, {"index"}), (127, {"index", "weight"})):
        pipeline = BatchPipeline(ArraySource(x=np.arange(examples)), 32)
        assert set(pipeline.batches_from(tf.zeros([], tf.int64), strategy)) == held


def test_what_is_not_resident_needs_an_iterator():
    pipeline = BatchPipeline(ArraySource(x=np.arange(128)), 32, resident=False)
    assert not pipeline.orders_in_graph(make_strategy("mirrored", 2))


def test_maps_of_a_pipeline_have_several_calls_under_way():
    """TensorFlow makes as many calls of a map as there are threads, two on two cores."""
    several = tf.data.Dataset.range(4).map(lambda x: x, num_parallel_calls=tf.data.AUTOTUNE)
    options = finished(several).options()
    assert options.threading.private_threadpool_size >= 8
    assert not options.autotune.enabled
