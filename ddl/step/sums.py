"""Sums of an update over its microbatches and replicas, in a fixed order.

    one strategy.run a microbatch   its sum is added to those before, on each replica
    one all-reduce an update        of the gradients, in few buffers
    one strategy.reduce an update   of a float64 vector of metric sums

TensorFlow's AddN writes its sum into the buffer of the first input that no other operation still
reads, and adds this input first. If an input has other readers, timing decides whether they have
finished. The sum of three or more numbers is then rounded differently from run to run, and two
equal runs diverge. Such sums occur in the gradient of a tensor that is used three times, such as
the input of an attention layer, and in the reduce over three or more replicas. TensorFlow's graph
optimizer also makes them from `a + b + c`. The sum of two numbers has the same bits in either
order. `fixed_order_of_sums` makes all sums from sums of two.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import gen_math_ops

from ddl.distribution.communication import reduce_options
from ddl.distribution.devices import local_devices
from ddl.distribution.path import path_of
from ddl.step.gradients import Variables

_SUM = tf.distribute.ReduceOp.SUM

# ResourceHandle::ANONYMOUS_NAME of TensorFlow: each execution creates a new variable. A name drawn
# at trace time would be shared by all workers of parameter servers, which share a trace.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"

# The graph optimizer marks the sums that it has merged with this attribute, and skips marked sums.
_MERGED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"

# These two make all sums of a graph: `+`, tf.add_n, the tape's and tf.distribute's. The names are
# private to TensorFlow and checked by tests/step/test_sums.py.
_add, _add_n = gen_math_ops.add_v2, gen_math_ops.add_n


def over_microbatches(
    strategy: tf.distribute.Strategy,
    microbatches: int,
    one: Callable[[Any, Any, Any], Any],
    batch: Any,
    zeros: Callable[[], Any],
) -> Any:
    """Returns the sum of a function of the microbatches, of each replica. Cross-replica context.

    The loop is outside of strategy.run, so that layers can communicate across replicas in each
    microbatch, as batch normalization does. One microbatch at a time is in memory; TensorFlow's
    default would let up to 10 run forward before the first one runs backward.

    A loop carries its tensors on one device, to which all other GPUs would send their sums in each
    turn. Several GPUs therefore add in variables of their own, which live for one update.

    Args:
      strategy: The strategy.
      microbatches: Number of microbatches.
      one: Takes the batch, the number of the microbatch and the sum so far; returns the sum with
        that microbatch, or the microbatch's own if the sum so far is None. Replica context.
      batch: The batch, with the rows of each replica.
      zeros: Returns the empty sum. Replica context.
    """

    def run(index: tf.Tensor | int, so_far: Any) -> Any:
        return strategy.run(one, args=(batch, index, so_far))

    if microbatches == 1:
        return run(0, None)
    start = strategy.run(zeros)
    if not sums_in_variables(strategy):
        return tf.while_loop(
            lambda index, so_far: index < microbatches,
            lambda index, so_far: (index + 1, run(index, so_far)),
            (tf.constant(0), start),
            parallel_iterations=1,
        )[1]
    handles = strategy.run(_zero_variables, args=(start,))

    def turn(index: tf.Tensor) -> tuple[tf.Tensor]:
        strategy.run(_add_to, args=(handles, run(index, None)))
        return (index + 1,)

    first = (tf.constant(0),)
    tf.while_loop(lambda index: index < microbatches, turn, first, parallel_iterations=1)
    return strategy.run(_read_once, args=(handles, start))


def sums_in_variables(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the replicas add up their microbatches in variables of their own."""
    return len(local_devices(strategy)) > 1 and path_of(strategy).sums_on_devices


def _zero_variables(like: Any) -> list[tf.Tensor]:
    """Returns handles of new variables of zeros on the current device, one for each tensor."""
    handles = []
    for one in tf.nest.flatten(like):
        # Not tf.zeros: TensorFlow would keep it as a constant, and copy it in each update.
        zeros = tf.raw_ops.Empty(shape=one.shape.as_list(), dtype=one.dtype, init=True)
        handle = tf.raw_ops.VarHandleOp(dtype=one.dtype, shape=one.shape, shared_name=_ANONYMOUS)
        tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
        handles.append(handle)
    return handles


def _add_to(handles: list[tf.Tensor], values: Any) -> None:
    for handle, value in zip(handles, tf.nest.flatten(values), strict=True):
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.convert_to_tensor(value))


def _read_once(handles: list[tf.Tensor], like: Any) -> Any:
    """Returns the values of variables, and ends the variables."""
    values = []
    for handle, one in zip(handles, tf.nest.flatten(like), strict=True):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=one.dtype)
        with tf.control_dependencies([value]):
            tf.raw_ops.DestroyResourceOp(resource=handle)
        values.append(tf.ensure_shape(value, one.shape))
    return tf.nest.pack_sequence_as(like, values)


class AllReduce:
    """Sums over all replicas. Cross-replica context, in a graph.

    Several workers pack gradients into buffers of a given size, last layers first. The backward
    pass computes these first, so that their all-reduce overlaps with the rest of the pass.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Keeps the strategy under which the gradients are computed."""
        self._strategy = strategy
        self._options = reduce_options()

    def __call__(self, gradients: Sequence[Any], variables: Variables) -> list[Any]:
        """Returns the sums, one per variable, present on every replica.

        TensorFlow's reduce packs in reverse order, one dtype at a time.

        Args:
          gradients: One value per variable; a per-replica value with several replicas.
          variables: The variables, in the order of the gradients.
        """
        sums: list[Any] = list(gradients)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        # The reduce concatenates the gradients of a buffer, so they must share a dtype.
        for dtype in dict.fromkeys(variable.value.dtype for variable in variables):
            places = [i for i, v in enumerate(variables) if v.value.dtype == dtype]
            pairs = [(gradients[i], variables[i].value) for i in places]
            reduced = self._strategy.extended.batch_reduce_to(_SUM, pairs, self._options)
            for place, gradient in zip(places, reduced, strict=True):
                sums[place] = gradient
        return sums

    def of_sums(self, sums: Any) -> tf.Tensor:
        """Returns the sum of a float64 vector over all replicas, on the first one's device.

        `tf.distribute.Strategy.reduce` adds on the host, for which GPUs would have to wait.

        Args:
          sums: The vector of each replica.
        """
        if not path_of(self._strategy).sums_on_devices:
            return self._strategy.reduce(_SUM, sums, axis=None)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        reduced = self._strategy.extended.reduce_to(_SUM, sums, sums, self._options)
        return self._strategy.experimental_local_results(reduced)[0]


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
