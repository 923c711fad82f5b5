"""The sum of a function of the microbatches of an update, on each replica."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ddl.distribution.devices import local_devices
from ddl.distribution.path import path_of

# ResourceHandle::ANONYMOUS_NAME of TensorFlow: each execution creates a new variable. A name drawn
# at trace time would be shared by all workers of parameter servers, which share a trace.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


def over_microbatches(
    strategy: tf.distribute.Strategy,
    microbatches: int,
    one: Callable[[Any, Any], Any],
    zeros: Callable[[], Any],
) -> Any:
    """Returns the sum of a function of the microbatches, of each replica.

    The loop is outside of strategy.run, so that layers can communicate across replicas in each
    microbatch, as batch normalization does. One microbatch at a time is in memory; TensorFlow's
    default would let up to 10 run forward before the first one runs backward.

    A loop carries its tensors on one device, to which all other GPUs would send their sums in each
    turn. Several GPUs therefore add in variables of their own, which live for one update.

    Args:
      strategy: The strategy.
      microbatches: Number of microbatches.
      one: Takes the number of the microbatch and the sum so far; returns the sum with that
        microbatch, or the microbatch's own if the sum so far is None. It calls `strategy.run`.
      zeros: Returns the empty sum. Replica context.
    """
    if microbatches == 1:
        return one(0, None)
    start = strategy.run(zeros)
    like = strategy.experimental_local_results(start)[0]
    in_variables = len(local_devices(strategy)) > 1 and path_of(strategy).sums_on_devices
    if not in_variables:
        return tf.while_loop(
            lambda index, so_far: index < microbatches,
            lambda index, so_far: (index + 1, one(index, so_far)),
            (tf.constant(0), start),
            parallel_iterations=1,
        )[1]

    def add(handles: list[tf.Tensor], values: Any) -> None:
        for handle, value in zip(handles, tf.nest.flatten(values), strict=True):
            own = tf.convert_to_tensor(value)
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=own)

    def turn(index: tf.Tensor) -> tuple[tf.Tensor]:
        strategy.run(add, args=(variables, one(index, None)))
        return (index + 1,)

    def read(handles: list[tf.Tensor]) -> Any:
        values = [_read_once(*own) for own in zip(handles, tf.nest.flatten(like), strict=True)]
        return tf.nest.pack_sequence_as(like, values)

    variables = strategy.run(lambda: [_zero_variable(value) for value in tf.nest.flatten(like)])
    tf.while_loop(
        lambda index: index < microbatches, turn, (tf.constant(0),), parallel_iterations=1
    )
    return strategy.run(read, args=(variables,))


def _zero_variable(like: tf.Tensor) -> tf.Tensor:
    """Returns the handle of a new variable of zeros on the current device."""
    # Not tf.zeros: TensorFlow would keep it as a constant, and copy it in each update.
    zeros = tf.raw_ops.Empty(shape=like.shape.as_list(), dtype=like.dtype, init=True)
    handle = tf.raw_ops.VarHandleOp(dtype=like.dtype, shape=like.shape, shared_name=_ANONYMOUS)
    tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
    return handle


def _read_once(handle: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns the value of a variable, and ends the variable."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=like.dtype)
    with tf.control_dependencies([value]):
        tf.raw_ops.DestroyResourceOp(resource=handle)
    return tf.ensure_shape(value, like.shape)
