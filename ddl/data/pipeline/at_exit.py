"""Iterators that end before Python does.

A thread of tf.data may call Python while the interpreter shuts down, and start a thread there,
which never begins. TensorFlow then waits for ever when the last reference to the iterator goes.
"""

import atexit
import weakref
from typing import Any

_LIVE: weakref.WeakSet = weakref.WeakSet()


def ended_at_exit(iterator: Any) -> Any:
    """Returns the iterator, after noting that it ends while Python can still be called.

    Args:
      iterator: A plain iterator of a `tf.data.Dataset`, or a distributed one.
    """
    for each in getattr(iterator, "_iterators", [iterator]):  # of a distributed one: by worker
        _LIVE.add(getattr(each, "_iterator", each))
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
