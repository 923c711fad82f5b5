"""Iterators end before their data set and before Python, which their threads may call."""

import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, iterators
from ddl.step.replicas import distributed_iterator
from tests.conftest import make_strategy


def iterator_over(strategy):
    return distributed_iterator(BatchPipeline(Source([{"x": 0.0}] * 100), 10), strategy)


def made_by(iterator):
    """TensorFlow's iterators of a strategy's iterator."""
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return [each._iterator for each in iterator._iterators]
    return [iterator]


@pytest.mark.parametrize("kind", ["default", "one_device", "mirrored"])
def test_all_iterators_end(kind):
    default = tf.distribute.get_strategy()
    iterator = iterator_over(default if kind == "default" else make_strategy(kind, 2))
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
    (made,) = made_by(iterator)
    name = "_multi_device_iterator_resource" if kind == "mirrored" else "_iterator_resource"
    assert getattr(made, name) is None
