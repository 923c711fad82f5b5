"""Iterators that end before Python does.

A thread of tf.data may call Python while the interpreter shuts down, and start a thread there,
which never begins. TensorFlow then waits for ever when the last reference to the iterator goes.
"""

import atexit
import weakref
from typing import Any

import tensorflow as tf

_LIVE: weakref.WeakSet = weakref.WeakSet()


def iterator_of(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy | None) -> Any:
    """Returns an iterator, which ends while Python can still be called.

    Args:
      dataset: The data set.
      strategy: Distributes the batches; None for a plain iterator.
    """
    iterator = iter(
        dataset if strategy is None else strategy.experimental_distribute_dataset(dataset)
    )
    if isinstance(iterator, tf.distribute.DistributedIterator):
        _LIVE.update(each._iterator for each in iterator._iterators)  # one for each worker
    else:  # also of TensorFlow's default strategy, which distributes nothing
        _LIVE.add(iterator)
    return iterator


@atexit.register
def _end_all() -> None:
    for iterator in list(_LIVE):
        # Private to TensorFlow; tests/data/pipeline/test_at_exit.py guards the names.
        if hasattr(iterator, "_multi_device_iterator_resource"):
            iterator._device_iterators = []
            iterator._multi_device_iterator_resource = None
        else:
            iterator._iterator_resource = None
