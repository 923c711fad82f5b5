"""Checks of evaluation data, and errors of data that are being read."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source
from ddl.data.checks import data_errors
from ddl.errors import DataError
from tests.conftest import make_strategy
from tests.data.test_source import png


def read(source, batches=20):
    """Reads batches as a loop on the devices does."""
    iterator = BatchPipeline(source, 2, shuffle=False).iterator(make_strategy("one_device", 1))

    @tf.function
    def loop():
        for _ in tf.range(batches):
            next(iterator)

    loop()


def test_an_example_that_cannot_be_decoded_is_named():
    good = tf.io.encode_png(np.zeros([1, 1, 1], np.uint8)).numpy()
    source = Source([{"png": good}] * 5 + [{"png": good[:20]}], png)
    message = r"\d+: png failed on item 5 of list: .*PNG.* Correct or remove it.$"
    with pytest.raises(DataError, match=message) as caught, data_errors(source):
        read(source)
    assert "Iterator" not in str(caught.value)
    assert "node" not in str(caught.value)
