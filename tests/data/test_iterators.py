"""Iterators end before their data set and before Python, which their threads may call."""

import gc

import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, iterators
from tests.conftest import make_strategy


def iterator_over(strategy):
    return BatchPipeline(Source([{"x": 0.0}] * 100), 10).iterator(strategy)


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
    name = "_iterator_resource" if kind == "default" else "_multi_device_iterator_resource"
    assert getattr(made, name) is None


@pytest.mark.parametrize("where", ["eager", "while_tracing"])
def test_a_dropped_distributed_iterator_reads_nothing_more(where):
    """TensorFlow frees the data set before it waits for the thread that reads it."""
    iterator = iterator_over(make_strategy("mirrored", 2))
    next(iterator)
    (made,) = made_by(iterator)
    resource, specs = made._multi_device_iterator_resource, tf.nest.flatten(made.element_spec)

    def read(incarnation: int) -> list[tf.Tensor]:
        return tf.raw_ops.MultiDeviceIteratorGetNextFromShard(
            multi_device_iterator=resource,
            shard_num=0,
            incarnation_id=tf.constant(incarnation, tf.int64),
            output_types=[spec.dtype for spec in specs],
            output_shapes=[spec.shape for spec in specs],
        )

    read(1)
    dropped = [iterator]
    del iterator, made

    def drop() -> tf.Tensor:
        dropped.clear()
        gc.collect()
        return tf.zeros([])

    drop() if where == "eager" else tf.function(drop).get_concrete_function()
    with pytest.raises(tf.errors.InvalidArgumentError, match="incarnation"):
        read(1)
    with pytest.raises(tf.errors.OutOfRangeError):
        read(2)
