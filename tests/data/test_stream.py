from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from ddl.data import ArraySource, BatchPipeline, StreamSource, as_source, batched, stream
from ddl.data.checks import data_errors
from ddl.data.conversion import sources_by_name
from ddl.data.source import checked_element_spec
from ddl.errors import ConfigError, DataError
from ddl.precision import set_numerics
from tests.data.host_batches import host_dataset


def numbers(count):
    return tf.data.Dataset.range(count).map(lambda x: {"x": x})


def taken(batches, count):
    return [(b["x"].numpy().tolist(), b["weight"].numpy().tolist()) for b in batches.take(count)]


def test_each_epoch_is_padded_with_its_own_examples_at_weight_0():
    batches = host_dataset(BatchPipeline(StreamSource(numbers(5)), 3, shuffle=False))
    assert batches.element_spec["x"].shape == [3]
    assert taken(batches, 3) == [
        ([0, 1, 2], [1, 1, 1]),
        ([3, 4, 3], [1, 1, 0]),
        ([0, 1, 2], [1, 1, 1]),
    ]


def test_more_rows_than_examples():
    assert taken(host_dataset(BatchPipeline(StreamSource(numbers(2)), 5, shuffle=False)), 1) == [
        ([0, 1, 0, 1, 0], [1, 1, 0, 0, 0])
    ]


@pytest.mark.parametrize("of_epoch", [False, True])
def test_going_on_skips_into_the_epoch(of_epoch):
    def shuffled(epoch):
        return numbers(10).shuffle(10, seed=epoch)

    set_numerics("float32", seed=0)  # TensorFlow's own global seed must not become 0 by it
    source = StreamSource(shuffled if of_epoch else numbers(10))
    pipeline = BatchPipeline(source, 4, shuffle=False)
    whole = taken(host_dataset(pipeline), 9)
    for start in (1, 3, 5):
        assert taken(host_dataset(pipeline, start), 9 - start) == whole[start:]
    orders = [[x for rows, _ in whole[i : i + 3] for x in rows][:10] for i in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert (orders[0] != orders[1]) == of_epoch


def test_weights_of_examples_count():
    data = tf.data.Dataset.from_tensor_slices(
        {"x": np.arange(3), "weight": np.array([0.5, 2.0, 3.0])}
    )
    pipeline = BatchPipeline(StreamSource(data), 2, shuffle=False)
    assert not pipeline.always_full
    assert taken(host_dataset(pipeline), 2) == [([0, 1], [0.5, 2]), ([2, 2], [3, 0])]


def test_a_stream_that_ends_early_is_an_error_and_not_a_short_epoch():
    source = StreamSource(numbers(10).filter(lambda e: e["x"] < 5), num_examples=8)
    for shuffle in (False, True):
        with pytest.raises(tf.errors.OpError, match="expected to contain 8 elements"):
            taken(host_dataset(BatchPipeline(source, 4, shuffle=shuffle)), 3)


def test_endless_streams_have_epochs_of_the_given_length():
    assert (
        taken(
            host_dataset(BatchPipeline(StreamSource(numbers(4).repeat(), 3), 3, shuffle=False)), 2
        )
        == [([0, 1, 2], [1, 1, 1])] * 2
    )


def epochs(source, count=1, batch=10, **arguments):
    """The examples of some epochs in the order in which training sees them."""
    pipeline = BatchPipeline(source, batch, **arguments)
    batches = taken(host_dataset(pipeline), count * pipeline.steps_per_epoch)
    seen = [x for rows, weights in batches for x, w in zip(rows, weights, strict=True) if w]
    return np.array(seen).reshape(count, -1)


def test_each_epoch_is_shuffled_whole_by_seed_and_epoch():
    orders = [*epochs(StreamSource(numbers(1000)), 3), *epochs(StreamSource(numbers(1000)), seed=1)]
    orders.append(np.arange(1000))
    for i, first in enumerate(orders):
        assert sorted(first) == list(range(1000))
        for second in orders[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
            assert np.count_nonzero(first == second) < 12


def test_data_sorted_by_class_come_mixed():
    labels = np.repeat(np.arange(10), 50)
    source = StreamSource(tf.data.Dataset.from_tensor_slices({"x": labels}))
    first = epochs(source)[0][:100]
    assert (np.bincount(first, minlength=10) > 2).all()


def test_the_order_depends_on_no_seed_of_tensorflow():
    def of_epoch(epoch):
        return numbers(50)

    expected = epochs(StreamSource(numbers(50)), 2)
    try:
        for seed in (0, 1, 77):
            tf.random.set_seed(seed)
            for dataset in (numbers(50), of_epoch):
                np.testing.assert_array_equal(epochs(StreamSource(dataset, 50), 2), expected)
    finally:
        set_numerics("float32", seed=0)


def test_the_shuffled_order_never_changes():
    # Checkpoints of earlier versions count on these very numbers.
    assert epochs(StreamSource(numbers(10)), 2, seed=3).tolist() == IN_ONE
    in_shards = taken(StreamSource(shard, SHARDS).batches(8, 0, seed=3, shuffle=True), 2)
    assert [rows for rows, _ in in_shards] == IN_SHARDS


@pytest.mark.parametrize("buffer", [None, 3, 1])
@pytest.mark.parametrize("shards", [False, True])
def test_resuming_a_shuffled_epoch_gives_the_same_batches(buffer, shards):
    given = (shard, SHARDS) if shards else (numbers(14),)
    pipeline = BatchPipeline(StreamSource(*given, shuffle_buffer=buffer), 8, seed=5)
    whole = taken(host_dataset(pipeline), 6)
    for start in (1, 3):
        assert taken(host_dataset(pipeline, start), 6 - start) == whole[start:]
    steps = pipeline.steps_per_epoch
    for first in range(0, 6, steps):
        epoch = whole[first : first + steps]
        seen = [x % 1000 for batch in epoch for x, w in zip(*batch, strict=True) if w]
        all_of_them = [100 * s + i for s, n in enumerate(SHARDS) for i in range(n)]
        assert sorted(seen) == (all_of_them if shards else list(range(14)))


def test_the_last_batch_of_a_shuffled_epoch_is_padded_with_its_own_examples():
    for rows, weights in taken(host_dataset(BatchPipeline(StreamSource(numbers(5)), 3)), 6)[1::2]:
        assert weights == [1, 1, 0]
        assert rows[2] == rows[0]


def test_shards_are_shuffled_each_in_its_own_order():
    def shard(epoch, number):
        return numbers(100)

    both = BatchPipeline(StreamSource(shard, [100, 100]), 200, seed=2)
    ((rows, _),) = taken(host_dataset(both), 1)
    assert sorted(rows[:100]) == sorted(rows[100:]) == list(range(100))
    assert np.count_nonzero(np.array(rows[:100]) == rows[100:]) < 8


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    return found


def test_a_small_buffer_shuffles_within_its_size_and_says_so(warnings):
    source = StreamSource(numbers(100), shuffle_buffer=20)
    assert not warnings
    (order,) = epochs(source)
    assert sorted(order) == list(range(100))
    assert (order <= np.arange(100) + 19).all()
    assert (order != np.arange(100)).any()
    (warning,) = warnings
    assert "shuffles within 20 of 100 examples." in warning
    epochs(source)
    assert len(warnings) == 1
    epochs(StreamSource(shard, SHARDS, shuffle_buffer=4), batch=8)
    assert "within 4 of 5 examples in each of 4 shards" in warnings[1]


def test_no_warning_where_an_epoch_is_shuffled_whole_or_not_at_all(warnings):
    for buffer in (None, 100, 1000, 1):
        epochs(StreamSource(numbers(100), shuffle_buffer=buffer))
    epochs(StreamSource(numbers(100), shuffle_buffer=20), shuffle=False)
    assert not warnings


def test_the_buffer_is_as_large_as_memory_allows(monkeypatch, warnings):
    # 10 shards of examples of 1,000 + 8 bytes in two tensors.
    monkeypatch.setattr(stream, "_SHUFFLED_BYTES", 10 * 20 * (1008 + 2 * 128))

    def shard(epoch, number):
        return numbers(30).map(lambda e: {**e, "image": tf.zeros([10, 100], tf.uint8)})

    source = StreamSource(shard, [30] * 10)
    taken(source.batches(10, 0, seed=0, shuffle=True), 1)
    assert "within 20 of 30 examples in each of 10 shards" in warnings[0]
    huge = StreamSource(numbers(3).map(lambda e: {"x": tf.zeros([10**6])}))
    assert len(taken(host_dataset(BatchPipeline(huge, 1)), 3)) == 3


def test_what_shuffles_itself_may_be_shuffled_again():
    def shuffled(epoch):
        return numbers(50).shuffle(50, seed=epoch)

    set_numerics("float32", seed=0)
    (order,) = epochs(StreamSource(shuffled))
    assert sorted(order) == list(range(50))


def test_a_buffer_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="shuffle_buffer must be at least 1, got 0"):
        StreamSource(numbers(4), shuffle_buffer=0)


SHARDS = [5, 3, 4, 2]


def shard(epoch, number):
    """Numbers that say from which shard they are, and which epoch."""
    first = 100 * number + 1000 * epoch
    return tf.data.Dataset.range(first, first + SHARDS[number]).map(lambda x: {"x": x})


def test_shards_give_equal_parts_of_each_batch():
    pipeline = BatchPipeline(StreamSource(shard, SHARDS), 8, shuffle=False)
    assert (pipeline.num_examples, pipeline.steps_per_epoch) == (14, 3)
    assert not pipeline.always_full
    assert taken(host_dataset(pipeline), 4) == [
        ([0, 1, 100, 101, 200, 201, 300, 301], [1] * 8),
        ([2, 3, 102, 102, 202, 203, 300, 301], [1, 1, 1, 0, 1, 1, 0, 0]),
        ([4, 4, 100, 101, 200, 201, 300, 301], [1, 0, 0, 0, 0, 0, 0, 0]),
        ([1000, 1001, 1100, 1101, 1200, 1201, 1300, 1301], [1] * 8),
    ]
    whole = taken(host_dataset(pipeline), 9)
    for start in (1, 4, 5):
        assert taken(host_dataset(pipeline, start), 9 - start) == whole[start:]


@pytest.mark.parametrize(
    ("rows", "opened"),
    [
        ([0, 1, 2, 3], {0, 1}),
        ([4, 5, 6, 7], {2, 3}),
        ([3], {1}),
        ([1, 6, 5, 0], {0, 2, 3}),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_only_shards_whose_rows_are_asked_for_are_read(rows, opened, shuffle):
    asked = set()

    def noting(epoch, number):
        def note(x):
            asked.add(number)
            return x

        return shard(epoch, number).map(
            lambda e: {"x": tf.ensure_shape(tf.numpy_function(note, [e["x"]], tf.int64), [])}
        )

    source = StreamSource(noting, SHARDS)
    whole = taken(StreamSource(shard, SHARDS).batches(8, 0, seed=1, shuffle=shuffle), 4)
    part = taken(source.batches(8, 0, seed=1, shuffle=shuffle, rows=np.array(rows)), 4)
    assert part == [tuple([column[row] for row in rows] for column in batch) for batch in whole]
    assert asked == opened


def test_what_a_shard_holds_beyond_its_length_is_not_read():
    def endless(epoch, number):
        return tf.data.Dataset.range(10).map(
            lambda x: {"x": tf.where(x < SHARDS[number], 1.0, float("nan"))}
        )

    pipeline = BatchPipeline(StreamSource(endless, np.array(SHARDS)), 16)
    for values, _ in taken(host_dataset(pipeline), 4):
        assert values == [1.0] * 16


def test_shards_that_are_full_have_no_padding():
    def even(epoch, number):
        return numbers(4)

    pipeline = BatchPipeline(StreamSource(even, [4, 4]), 4)
    assert pipeline.always_full
    assert pipeline.steps_per_epoch == 2


def test_shards_that_cannot_be_are_told():
    with pytest.raises(ConfigError, match="needs a function, got one tf.data.Dataset"):
        StreamSource(numbers(4), [2, 2])
    with pytest.raises(ConfigError, match="multiple of the 4 shards .*, got 6.* Change it"):
        BatchPipeline(StreamSource(shard, SHARDS), 6)
    with pytest.raises(DataError, match="at most 5, .* tf.data.Dataset, got 6"):
        StreamSource(shard, [6, 3, 4, 2])
    with pytest.raises(DataError, match="num_examples must be at least 1, got 0"):
        StreamSource(shard, [5, 0])
    with pytest.raises(DataError, match="num_examples is an empty list"):
        StreamSource(shard, [])
    late = StreamSource(shard, [5, 3, 4, 3])
    with pytest.raises(tf.errors.OpError, match="expected to contain 3 elements"):
        taken(late.batches(4, 0), 4)


@pytest.mark.parametrize(
    ("dataset", "num_examples", "message"),
    [
        (numbers(4).filter(lambda e: True), None, "is unknown. Pass it"),
        (numbers(4).repeat(), None, "is infinite"),
        (numbers(4), 5, "at most 4, .* tf.data.Dataset, got 5"),
        (numbers(0), None, "at least one example, got 0. Correct what it reads"),
        (tf.data.Dataset.range(4), None, "must be dicts"),
        (numbers(4).batch(2), None, "batches of 2 rows, made by batch. Remove .batch"),
    ],
)
def test_unfit_streams_are_refused(dataset, num_examples, message):
    with pytest.raises(DataError, match=message):
        StreamSource(dataset, num_examples)


def test_what_as_source_takes():
    x, y = np.zeros([4, 2]), np.arange(4)
    source = ArraySource(x=x)
    assert as_source(source) is source
    assert set(as_source({"a": x}).element_spec) == {"a"}
    assert set(as_source((x, y)).element_spec) == {"image", "label"}
    pairs = as_source(tf.data.Dataset.from_tensor_slices((x, y)))
    assert set(pairs.element_spec) == {"image", "label"}
    assert len(pairs) == 4
    for wrong in (x, "digits", (x, y, y, y), None):
        with pytest.raises(DataError, match="a mapping of arrays"):
            as_source(wrong)
    for several in ([source, source], (source, pairs), {"a": source, "b": numbers(3)}):
        with pytest.raises(DataError, match="Expected one data set, got 2: .*Pass one of them"):
            as_source(several)
    with pytest.raises(DataError, match=r"--mode=eval\. To train on several with a step of your "):
        as_source([source, source], "Trainer.train_data")
    for several in ([source, source], {"a": source, "b": pairs}):
        with pytest.raises(DataError, match=r"--mode=eval\.\n  in Trainer.eval_data$"):
            as_source(several, "Trainer.eval_data")
    with pytest.raises(DataError, match=r"is unknown\. Pass it: .*\n  in Trainer.train_data$"):
        sources_by_name(numbers(4).filter(lambda example: True))


IN_ONE = [[8, 5, 3, 7, 4, 2, 9, 1, 6, 0], [9, 7, 5, 2, 6, 8, 4, 3, 1, 0]]
IN_SHARDS = [[3, 1, 101, 102, 200, 202, 301, 300], [0, 4, 100, 100, 203, 201, 300, 301]]


@pytest.mark.parametrize(("num_examples", "names"), [(3, "epoch"), ([3, 3], "epoch, shard")])
def test_refuses_a_function_of_other_arguments(num_examples, names):
    message = rf"dataset must be a function of \({names}\), got .*test_stream.py:\d+: <lambda>\(\)"
    with pytest.raises(ConfigError, match=message):
        StreamSource(lambda: numbers(3), num_examples)


def test_refuses_a_function_that_returns_no_data_set():
    message = r"must return a tf.data.Dataset, got list from .*test_stream.py:\d+: <lambda>"
    with pytest.raises(DataError, match=message):
        StreamSource(lambda epoch: [1, 2], 2)


def of_generator(examples):
    spec = {"x": tf.TensorSpec([], tf.int64)}
    return tf.data.Dataset.from_generator(examples, output_signature=spec)


def test_a_stream_that_ends_early_is_an_error_of_the_data():
    source = StreamSource(of_generator(lambda: ({"x": x} for x in range(5))), 1_000)
    message = "must have 1,000 examples, got only 5. Set num_examples to 5, or correct"
    with pytest.raises(DataError, match=message), data_errors():
        list(source.batches(4, 0, seed=0, shuffle=False).take(300))


def test_a_generator_that_raises_names_its_line():
    def examples():
        yield {"x": {}["a"]}

    source = StreamSource(of_generator(examples), 3)
    message = r"failed: KeyError: 'a'\n  raised in .*test_stream.py:\d+\n    yield "
    with pytest.raises(DataError, match=message), data_errors():
        list(source.batches(3, 0, seed=0, shuffle=False).take(1))


@pytest.mark.parametrize(
    ("feature", "remedy"),
    [
        (tf.TensorSpec([None], tf.int64), "got .None,.. Pad or crop it to one shape"),
        (tf.TensorSpec([None, None, 3]), "got .None, None, 3.. Pad or crop it"),
        (tf.TensorSpec(None), "got <unknown>. Pad or crop it"),
        (tf.SparseTensorSpec([None], tf.int64), "a sparse tensor, as tf.io.VarLenFeature gives"),
        (tf.RaggedTensorSpec([None], tf.int64), r"a ragged tensor. Convert it .*to_tensor\(shape"),
        ({"y": tf.TensorSpec([])}, "a dict of y. Put its features beside the others"),
    ],
    ids=repr,
)
def test_features_without_one_dense_shape_get_their_remedy(feature, remedy):
    with pytest.raises(DataError, match=remedy) as caught:
        checked_element_spec({"x": feature})
    assert "batch" not in str(caught.value)


def test_the_optimizer_changes_no_batch_of_a_stream(monkeypatch):
    def two_epochs():
        tf.random.set_seed(1)

        def drawn(number):
            return {"x": tf.cast(number, tf.float32), "noise": tf.random.uniform([])}

        source = StreamSource(tf.data.Dataset.range(20).map(drawn, num_parallel_calls=1))
        batches = source.batches(4, 0, seed=1, shuffle=True).take(10)
        return np.array([[b["x"], b["noise"]] for b in batches.as_numpy_iterator()])

    optimizer = mock.Mock(side_effect=tf.raw_ops.OptimizeDatasetV2)
    monkeypatch.setattr(tf.raw_ops, "OptimizeDatasetV2", optimizer)
    found = two_epochs()
    assert optimizer.call_count == 1  # else each epoch takes memory
    noise = found[:, 1].ravel()
    assert len(np.unique(noise)) == 40  # draws do not begin anew in an epoch
    monkeypatch.setattr(stream, "optimized", lambda dataset: dataset)
    np.testing.assert_array_equal(found, two_epochs())


@pytest.mark.parametrize(
    "examples",
    [
        lambda values: tf.data.Dataset.from_tensor_slices({"x": values}).take(9).shuffle(9),
        lambda values: tf.data.Dataset.range(9).map(lambda i: {"x": values[i]}).prefetch(1),
    ],
    ids=["slices", "captured"],
)
def test_large_tensors_are_not_copied(monkeypatch, examples):
    optimizer = mock.Mock(side_effect=tf.raw_ops.OptimizeDatasetV2)
    monkeypatch.setattr(tf.raw_ops, "OptimizeDatasetV2", optimizer)
    values = tf.zeros([9, 100])
    for limit in (3_600, 3_599):
        monkeypatch.setattr(batched, "_MOST_COPIED", limit)
        StreamSource(examples(values))
    assert optimizer.call_count == 1
