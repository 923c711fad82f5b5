"""Checks of evaluation data, and errors of data that are being read."""

import types

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source
from ddl.data.checks import check_same_classes, check_same_features, data_errors
from ddl.errors import DataError
from tests.conftest import make_strategy
from tests.data.test_source import Blocks, Items, examples, png


def spec(**features):
    return {name: tf.TensorSpec(shape, dtype) for name, (shape, dtype) in features.items()}


TRAIN = spec(x=([2, 2], tf.float32), label=([], tf.int64))


def test_evaluation_data_may_have_more_features():
    check_same_features(TRAIN, TRAIN | spec(more=([], tf.string)))


def test_other_features_are_refused():
    with pytest.raises(DataError, match="'label' of the training data is missing from the eval"):
        check_same_features(TRAIN, spec(x=([2, 2], tf.float32)))
    with pytest.raises(
        DataError, match=r"'x' must .* \(2, 2\) in the training data and \(3, 2\) in"
    ):
        check_same_features(TRAIN, TRAIN | spec(x=([3, 2], tf.float32)))


@pytest.mark.parametrize(("dtype", "warns"), [(tf.uint8, True), (tf.float64, False)])
def test_integers_in_place_of_floats_are_warned_of(dtype, warns, caplog):
    check_same_features(TRAIN, TRAIN | spec(x=([2, 2], dtype)))
    assert ("'x' is float32 in the training data, but uint8" in caplog.text) == warns


def of_classes(*names):
    return types.SimpleNamespace(items=types.SimpleNamespace(class_names=names))


def test_classes_must_be_the_same():
    check_same_classes(of_classes("cat", "dog"), of_classes("cat", "dog"))
    check_same_classes(of_classes("cat", "dog"), Source({"x": [1]}))
    with pytest.raises(DataError, match="classes cat, dog, evaluation data dog, cat. "):
        check_same_classes(of_classes("cat", "dog"), of_classes("dog", "cat"))


def read(source, batches=20):
    """Reads batches as a loop on the devices does."""
    iterator = BatchPipeline(source, 2, shuffle=False).iterator(make_strategy("one_device", 1))

    @tf.function
    def loop():
        for _ in tf.range(batches):
            next(iterator)

    loop()


def raising(error, kind=Items):
    return Source(kind([*examples(), error, *examples(20)]))


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError("full"), DataError("own")])
def test_a_readers_error_is_raised_as_it_was(error):
    source = raising(error)
    with pytest.raises(type(error)) as caught, data_errors(source):
        read(source)
    assert caught.value is error
    assert source.error is None


@pytest.mark.parametrize("error", [KeyError("k"), FileNotFoundError("f")])
def test_other_errors_of_readers_become_errors_of_the_data(error):
    name = type(error).__name__
    for kind, did in [(Blocks, "be read"), (Items, "read item 10")]:
        source = raising(error, kind)
        message = f"{kind.__name__} could not {did}: {name}: .*. Correct "
        with pytest.raises(DataError, match=message), data_errors(source):
            read(source)


def test_an_error_that_was_met_while_reading_ahead():
    """The reader raises while a loop trains on the batches before."""
    source = Source(Items([*examples(50), OSError("disk"), *examples(50)]))
    iterator = BatchPipeline(source, 2, shuffle=False).iterator(make_strategy("one_device", 1))
    with data_errors(source):
        next(iterator)
        while source.error is None:  # until the thread has met it
            pass
    with pytest.raises(OSError, match="disk"), data_errors(source):
        [next(iterator) for _ in range(30)]


def test_an_example_that_cannot_be_decoded_is_named():
    good = tf.io.encode_png(np.zeros([1, 1, 1], np.uint8)).numpy()
    source = Source([{"png": good}] * 5 + [{"png": good[:20]}], png)
    message = r"\d+: png failed on item 5 of list: .*PNG.* Correct or remove it.$"
    with pytest.raises(DataError, match=message) as caught, data_errors(source):
        read(source)
    assert "Iterator" not in str(caught.value)
    assert "node" not in str(caught.value)


def test_values_that_a_layer_refuses_are_errors_of_the_data(monkeypatch):
    """No example is looked for, which takes up to a minute."""
    source = Source({"x": [1]})
    monkeypatch.setattr(source, "undecodable", lambda: pytest.fail("looked for an example"))

    @tf.function
    def gathered(index):
        return tf.gather(tf.zeros([8, 2]), index)

    @tf.function
    def loss(label):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(label, tf.zeros([1, 3]))

    message = r"indices\[1\] = 9 is not in \[0, 8\)"
    with pytest.raises(DataError, match=message), data_errors(source):
        gathered(tf.constant([1, 9]))
    message = "Received a label value of 5 which is outside"
    with pytest.raises(DataError, match=message), data_errors(source):
        loss(tf.constant([5]))


OTHERS = [
    tf.errors.ResourceExhaustedError(None, None, "OOM when allocating, Iterator"),
    tf.errors.UnavailableError(None, None, "with iterator: Iterator"),
    tf.errors.InternalError(None, None, "cuDNN failed"),
    ValueError("with iterator: Iterator"),
]


@pytest.mark.parametrize("error", OTHERS)
def test_errors_that_are_not_of_the_data_pass(error):
    with pytest.raises(type(error)) as caught, data_errors(Source({"x": [1]})):
        raise error
    assert caught.value is error
