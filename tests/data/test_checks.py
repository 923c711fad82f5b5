"""Checks of evaluation data, and errors of data that are being read."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline, Source, stream, subset
from ddl.data.checks import data_errors
from ddl.errors import DataError
from ddl.step.replicas import distributed_iterator
from tests.conftest import make_strategy
from tests.data.test_source import png


def read(source, batches=20):
    """Reads batches as a loop on the devices does."""
    pipeline = BatchPipeline(source, 2, shuffle=False)
    iterator = distributed_iterator(pipeline, make_strategy("one_device", 1))

    @tf.function
    def loop():
        for _ in tf.range(batches):
            next(iterator)

    loop()


def test_an_example_that_cannot_be_decoded_is_named():
    good = tf.io.encode_png(np.zeros([1, 1, 1], np.uint8)).numpy()
    source = subset(Source([{"png": good}] * 5 + [{"png": good[:20]}], png), [0, 5])
    message = r"\d+: png failed on item 5 of list: .*PNG.* Correct or remove it.$"
    with pytest.raises(DataError, match=message) as caught, data_errors(source):
        read(source)
    assert "Iterator" not in str(caught.value)
    assert "node" not in str(caught.value)


class Broken(list):
    def __getitem__(self, number):
        return {"x": 1 / (5 - number)}


def test_the_error_of_a_reader_keeps_its_cause():
    source = Source(Broken(range(6)))
    with pytest.raises(DataError, match="could not read item 5") as caught, data_errors(source):
        read(source)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_floats_that_a_factor_for_bytes_makes_tiny_are_told(caplog):
    task = ddl.Classification(ddl.models.mlp((4,), 2))
    for largest, times in ((1.0, 2), (255.0, 0)):
        caplog.clear()
        rows = np.linspace(0, largest, 12).reshape(3, 4), np.zeros(3, int)
        for data in (Source(rows), stream(tf.data.Dataset.from_tensor_slices(rows).batch(2))):
            task.check(data)
        assert caplog.text.count("input_scale = 1") == times
