import numpy as np
import pytest
import tensorflow as tf

from ddl.data import ArraySource, BatchPipeline, StreamSource, as_source
from ddl.errors import ConfigError, DataError
from ddl.precision import set_numerics


def numbers(count):
    return tf.data.Dataset.range(count).map(lambda x: {"x": x})


def taken(batches, count):
    return [(b["x"].numpy().tolist(), b["weight"].numpy().tolist()) for b in batches.take(count)]


def test_each_epoch_is_padded_with_its_own_examples_at_weight_0():
    batches = BatchPipeline(StreamSource(numbers(5)), 3).dataset()
    assert batches.element_spec["x"].shape == [3]
    assert taken(batches, 3) == [
        ([0, 1, 2], [1, 1, 1]),
        ([3, 4, 3], [1, 1, 0]),
        ([0, 1, 2], [1, 1, 1]),
    ]


def test_more_rows_than_examples():
    assert taken(BatchPipeline(StreamSource(numbers(2)), 5).dataset(), 1) == [
        ([0, 1, 0, 1, 0], [1, 1, 0, 0, 0])
    ]


@pytest.mark.parametrize("of_epoch", [False, True])
def test_going_on_skips_into_the_epoch(of_epoch):
    def shuffled(epoch):
        return numbers(10).shuffle(10, seed=epoch)

    set_numerics("float32", seed=0)  # TensorFlow's own global seed must not become 0 by it
    source = StreamSource(shuffled if of_epoch else numbers(10))
    pipeline = BatchPipeline(source, 4)
    whole = taken(pipeline.dataset(), 9)
    for start in (1, 3, 5):
        assert taken(pipeline.dataset(start), 9 - start) == whole[start:]
    orders = [[x for rows, _ in whole[i : i + 3] for x in rows][:10] for i in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert (orders[0] != orders[1]) == of_epoch


def test_weights_of_examples_count():
    data = tf.data.Dataset.from_tensor_slices(
        {"x": np.arange(3), "weight": np.array([0.5, 2.0, 3.0])}
    )
    pipeline = BatchPipeline(StreamSource(data), 2)
    assert not pipeline.always_full
    assert taken(pipeline.dataset(), 2) == [([0, 1], [0.5, 2]), ([2, 2], [3, 0])]


def test_a_stream_that_ends_early_is_an_error_and_not_a_short_epoch():
    source = StreamSource(numbers(10).filter(lambda e: e["x"] < 5), num_examples=8)
    with pytest.raises(tf.errors.OpError, match="expected to contain 8 elements"):
        taken(BatchPipeline(source, 4).dataset(), 3)


def test_endless_streams_have_epochs_of_the_given_length():
    assert (
        taken(BatchPipeline(StreamSource(numbers(4).repeat(), 3), 3).dataset(), 2)
        == [([0, 1, 2], [1, 1, 1])] * 2
    )


SHARDS = [5, 3, 4, 2]


def shard(epoch, number):
    """Numbers that say from which shard they are, and which epoch."""
    first = 100 * number + 1000 * epoch
    return tf.data.Dataset.range(first, first + SHARDS[number]).map(lambda x: {"x": x})


def test_shards_give_equal_parts_of_each_batch():
    pipeline = BatchPipeline(StreamSource(shard, SHARDS), 8)
    assert (pipeline.num_examples, pipeline.steps_per_epoch) == (14, 3)
    assert not pipeline.always_full
    assert taken(pipeline.dataset(), 4) == [
        ([0, 1, 100, 101, 200, 201, 300, 301], [1] * 8),
        ([2, 3, 102, 102, 202, 203, 300, 301], [1, 1, 1, 0, 1, 1, 0, 0]),
        ([4, 4, 100, 101, 200, 201, 300, 301], [1, 0, 0, 0, 0, 0, 0, 0]),
        ([1000, 1001, 1100, 1101, 1200, 1201, 1300, 1301], [1] * 8),
    ]
    whole = taken(pipeline.dataset(), 9)
    for start in (1, 4, 5):
        assert taken(pipeline.dataset(start), 9 - start) == whole[start:]


@pytest.mark.parametrize(
    ("rows", "opened"),
    [
        ([0, 1, 2, 3], {0, 1}),
        ([4, 5, 6, 7], {2, 3}),
        ([3], {1}),
        ([1, 6, 5, 0], {0, 2, 3}),
    ],
)
def test_only_shards_whose_rows_are_asked_for_are_read(rows, opened):
    asked = set()

    def noting(epoch, number):
        def note(x):
            asked.add(number)
            return x

        return shard(epoch, number).map(
            lambda e: {"x": tf.ensure_shape(tf.numpy_function(note, [e["x"]], tf.int64), [])}
        )

    source = StreamSource(noting, SHARDS)
    whole = taken(StreamSource(shard, SHARDS).batches(8, 0), 4)
    part = taken(source.batches(8, 0, rows=np.array(rows)), 4)
    assert part == [tuple([column[row] for row in rows] for column in batch) for batch in whole]
    assert asked == opened


def test_what_a_shard_holds_beyond_its_length_is_not_read():
    def endless(epoch, number):
        return tf.data.Dataset.range(10).map(
            lambda x: {"x": tf.where(x < SHARDS[number], 1.0, float("nan"))}
        )

    pipeline = BatchPipeline(StreamSource(endless, np.array(SHARDS)), 16)
    for values, _ in taken(pipeline.dataset(), 4):
        assert values == [1.0] * 16


def test_shards_that_are_full_have_no_padding():
    def even(epoch, number):
        return numbers(4)

    pipeline = BatchPipeline(StreamSource(even, [4, 4]), 4)
    assert pipeline.always_full
    assert pipeline.steps_per_epoch == 2


def test_shards_that_cannot_be_are_told():
    with pytest.raises(ConfigError, match="a tf.data.Dataset is one stream"):
        StreamSource(numbers(4), [2, 2])
    with pytest.raises(ConfigError, match="not a multiple of the 4 shards"):
        BatchPipeline(StreamSource(shard, SHARDS), 6)
    with pytest.raises(DataError, match="num_examples is 6, but the tf.data.Dataset has 5"):
        StreamSource(shard, [6, 3, 4, 2])
    with pytest.raises(DataError, match="num_examples is 0: there are no examples"):
        StreamSource(shard, [5, 0])
    with pytest.raises(DataError, match="no shards"):
        StreamSource(shard, [])
    late = StreamSource(shard, [5, 3, 4, 3])
    with pytest.raises(tf.errors.OpError, match="expected to contain 3 elements"):
        taken(late.batches(4, 0), 4)


@pytest.mark.parametrize(
    ("dataset", "num_examples", "message"),
    [
        (numbers(4).filter(lambda e: True), None, "is unknown; give it"),
        (numbers(4).repeat(), None, "never ends"),
        (numbers(4), 5, "num_examples is 5, but the tf.data.Dataset has 4"),
        (numbers(0), None, "empty"),
        (tf.data.Dataset.range(4), None, "must be dicts"),
        (numbers(4).batch(2), None, "static shape"),
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
    for wrong in (x, "digits", (x, y, y), None):
        with pytest.raises(DataError, match="a mapping of arrays"):
            as_source(wrong)
