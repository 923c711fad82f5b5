"""Iterators end before their data set and before Python, which their threads may call."""

import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, iterators
from ddl.step.replicas import distributed_iterator
from tests.conftest import make_strategy


@pytest.mark.parametrize("kind", ["default", "one_device", "mirrored"])
def test_all_iterators_end(kind):
    strategy = tf.distribute.get_strategy() if kind == "default" else make_strategy(kind, 2)
    iterator = distributed_iterator(BatchPipeline(Source([{"x": 0.0}] * 100), 10), strategy)
    captured = tf.function(lambda: next(iterator))
    captured()

    def read_on() -> None:
        for _ in range(8):  # some batches may lie on the devices
            captured()

    ended = tf.errors.OutOfRangeError, tf.errors.InvalidArgumentError, tf.errors.CancelledError
    iterators._end_all()
    # The threads have ended, though the function still holds the iterator.
    with pytest.raises(ended):
        read_on()
    with pytest.raises(Exception, match="NoneType|None|list index"):
        next(iterator)
