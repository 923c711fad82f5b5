"""Iterators end before their data set and before Python, which their threads may call."""

import gc

import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, Source, iterators
from ddl.devices.path import CPU, GPU, taking
from tests.conftest import make_strategy


def iterator_over(strategy, path=CPU):
    with taking(path):
        return BatchPipeline(Source([{"x": 0.0}] * 100), 10).iterator(strategy)


@pytest.mark.parametrize("path", [CPU, GPU], ids=["plain", "distributed"])
def test_all_iterators_end(path):
    iterator = iterator_over(make_strategy("mirrored", 2), path)
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
    if isinstance(iterator, tf.distribute.DistributedIterator):
        (made,) = (each._iterator for each in iterator._iterators)
        assert made._multi_device_iterator_resource is None
    else:
        assert iterator._iterator_resource is None


def test_one_that_fails_hinders_no_other(monkeypatch):
    made = [iterator_over(make_strategy("one_device", 1)) for _ in range(2)]
    ended = []

    def end(iterator):
        ended.append(iterator)
        raise RuntimeError("no such name")

    monkeypatch.setattr(iterators, "_end", end)
    iterators._end_all()
    assert {*map(id, made)} <= {*map(id, ended)}


@pytest.mark.parametrize("where", ["eager", "while_tracing"])
def test_a_dropped_distributed_iterator_reads_nothing_more(where):
    """TensorFlow frees the data set before it waits for the thread that reads it."""
    iterator = iterator_over(make_strategy("mirrored", 2), GPU)
    next(iterator)
    (made,) = (each._iterator for each in iterator._iterators)
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
