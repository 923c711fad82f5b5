"""Sums in a fixed order, so that equal runs have equal bits.

TensorFlow's AddN writes its sum into the buffer of the first input that no other operation still
reads, and adds this input first. If an input has other readers, timing decides whether they have
finished. The sum of three or more numbers is then rounded differently from run to run, and two
equal runs diverge. Such sums occur in the gradient of a tensor that is used three times, such as
the input of an attention layer, and in the reduce over three or more replicas. TensorFlow's graph
optimizer also makes them from `a + b + c`. The sum of two numbers has the same bits in either
order. `fixed_order_of_sums` makes all sums from sums of two.
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
# private to TensorFlow and checked by tests/step/test_fixed_order.py.
_add, _add_n = gen_math_ops.add_v2, gen_math_ops.add_n


@contextmanager
def fixed_order_of_sums() -> Iterator[None]:
    """Makes all graphs traced in the `with` block add from left to right, two at a time.

    It applies to all threads, because each replica is traced in its own thread.
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
    while len(inputs) > 2:
        inputs = [_marked(_add_n(inputs[:2])), *inputs[2:]]
    return _marked(_add_n(inputs, name))


def _marked(total: Any) -> Any:
    if tf.is_symbolic_tensor(total):
        total.op._set_attr(_MERGED, attr_value_pb2.AttrValue(b=True))
    return total
