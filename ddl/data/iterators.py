"""Iterators that end before the data set they read, and before Python.

A thread of tf.data may call Python while the interpreter shuts down, and start a thread there,
which never begins. TensorFlow then waits for ever when the last reference to the iterator goes.

An iterator that TensorFlow distributes over devices frees its data set before it waits for the
thread that reads it (2.21: `MultiDeviceIterator`, whose last member goes first). Now and then, a
process that dropped such iterators ended with a segmentation fault.
"""

import atexit
import contextlib
import weakref
from typing import Any

import tensorflow as tf

_LIVE: weakref.WeakSet = weakref.WeakSet()


def iterator_of(dataset: Any) -> Any:
    """Returns an iterator over a data set, distributed or not, that ends before Python does."""
    iterator = iter(dataset)
    made = [iterator]
    if isinstance(iterator, tf.distribute.DistributedIterator):
        made = [each._iterator for each in iterator._iterators]  # one for each worker
    for one in made:
        _LIVE.add(one)
        if _is_distributed(one):
            resource = one._multi_device_iterator_resource
            weakref.finalize(one, _read_nothing, resource, one.element_spec).atexit = False
    return iterator


def keep_by(owner: Any, function: Any) -> None:
    """Lets a function of Python live as long as an object, once a data set has been made of it.

    `tf.numpy_function` puts it into a list of the outermost graph, which lives for good: some 20
    objects in each evaluation.
    """
    # Private to TensorFlow; tests/training/test_evaluation.py guards the names.
    wrapper = function.ag_dnc_wrapper__
    tf.compat.v1.get_default_graph()._py_funcs_used_in_graph.remove(wrapper)
    vars(owner)["function"] = wrapper


@atexit.register
def _end_all() -> None:
    for iterator in list(_LIVE):
        _LIVE.discard(iterator)
        with contextlib.suppress(Exception):  # the others must end nevertheless
            _end(iterator)


def _end(iterator: Any) -> None:
    # A function that captured the iterator still holds its resource. An empty data set ends its
    # threads.
    if _is_distributed(iterator):
        resource = iterator._multi_device_iterator_resource
        iterator._device_iterators = []
        iterator._multi_device_iterator_resource = None
        _read_nothing(resource, iterator.element_spec)
    else:
        resource, iterator._iterator_resource = iterator._iterator_resource, None
        tf.raw_ops.MakeIterator(dataset=_empty(iterator.element_spec), iterator=resource)


def _is_distributed(iterator: Any) -> bool:
    # Private to TensorFlow, as all names here; tests/data/test_iterators.py guards them.
    return hasattr(iterator, "_multi_device_iterator_resource")


def _read_nothing(resource: tf.Tensor, spec: Any) -> None:
    """Gives a distributed iterator an empty data set, after its thread has read the last batch."""
    with tf.init_scope():  # the garbage collector may call this while a function is traced
        tf.raw_ops.MultiDeviceIteratorInit(
            dataset=_empty(spec), multi_device_iterator=resource, max_buffer_size=1
        )


def _empty(spec: Any) -> tf.Tensor:
    """Returns the variant of a data set without elements, for dense tensors of these specs."""
    with tf.device("CPU:0"):
        rows = tf.nest.map_structure(
            lambda one: tf.zeros([0, *(size or 0 for size in one.shape)], one.dtype), spec
        )
        return tf.data.experimental.to_variant(tf.data.Dataset.from_tensor_slices(rows))
