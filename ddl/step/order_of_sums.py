"""Sums whose order does not depend on the timing of threads.

TensorFlow's AddN writes its sum into the buffer of the first input that no other operation still
reads, and adds this input first. If an input has other readers, timing decides whether they have
finished. The sum of three or more numbers is then rounded differently from run to run, and two
equal runs diverge. Such sums occur in the gradient of a tensor that is used three times, such as
the input of an attention layer, and in the reduce over three or more replicas. TensorFlow's graph
optimizer also makes them from `a + b + c`. The sum of two numbers has the same bits in either
order.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import gen_math_ops

# The graph optimizer marks the sums that it has merged with this attribute, and skips marked sums.
_MERGED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"

# These two make all sums of a graph: `+`, tf.add_n, the tape's and tf.distribute's. The names are
# private to TensorFlow and checked by tests/step/test_order_of_sums.py.
_add, _add_n = gen_math_ops.add_v2, gen_math_ops.add_n


@contextmanager
def fixed_order_of_sums() -> Iterator[None]:
    """Makes all graphs traced in the `with` block add from left to right, two at a time.

    It applies to all threads, because each replica is traced in its own thread. Integer sums are
    unchanged, since their order does not matter.
    """
    earlier = gen_math_ops.add_v2, gen_math_ops.add_n
    gen_math_ops.add_v2, gen_math_ops.add_n = _marked_add, _add_two_at_a_time
    try:
        yield
    finally:
        gen_math_ops.add_v2, gen_math_ops.add_n = earlier


@functools.wraps(_add)
def _marked_add(x: Any, y: Any, name: str | None = None) -> Any:
    return _marked(_add(x, y, name))


@functools.wraps(_add_n)
def _add_two_at_a_time(inputs: Sequence[Any], name: str | None = None) -> Any:
    # Not `+`, which broadcasts: AddN raises if the shapes differ.
    if len(inputs) < 3 or tf.executing_eagerly() or not _rounds(inputs[0]):
        return _marked(_add_n(inputs, name))
    *first, last = inputs
    total = functools.reduce(lambda a, b: _marked(_add_n([a, b])), first)
    return _marked(_add_n([total, last], name))


def _rounds(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is None or tf.as_dtype(dtype).is_floating or tf.as_dtype(dtype).is_complex


def _marked(total: Any) -> Any:
    if tf.is_symbolic_tensor(total):
        total.op._set_attr(_MERGED, attr_value_pb2.AttrValue(b=True))
    return total
