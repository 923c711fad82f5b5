import numpy as np
import pytest
import tensorflow as tf

from ddl.data import ArraySource, BatchPipeline, StreamSource, as_source
from ddl.errors import DataError
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
