"""The sum of a function of the microbatches of an update, on each replica."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ddl.distribution.devices import local_devices
from ddl.distribution.path import path_of
from ddl.step.onednn import in_own_graph
from ddl.step.packing import new_variable, zero_variable
from ddl.step.rows.summing import has_rows, joined, listed

_AT_ONCE = 1
"""Microbatches in memory. TensorFlow's default would let up to 10 run forward before the first one
runs backward, and keep the activations of all of them."""


def over_microbatches(
    strategy: tf.distribute.Strategy,
    microbatches: int,
    one: Callable[[Any, Any], Any],
    zeros: Callable[[], Any],
    own_graph: bool,
) -> Any:
    """Returns the sum of a function of the microbatches, of each replica.

    The loop is outside of strategy.run, so that layers can communicate across replicas in each
    microbatch, as synchronized batch normalization does.

    Args:
      strategy: The strategy.
      microbatches: Number of microbatches.
      one: Takes the number of the microbatch and the sum so far; returns the sum with that
        microbatch, or the microbatch's own if the sum so far is None. It calls `strategy.run`.
      zeros: Returns the empty sum. Replica context.
      own_graph: Whether each microbatch needs a graph of its own (`ddl.step.onednn`).
    """
    if microbatches == 1:
        return one(0, None)
    if own_graph:
        one = in_own_graph(one)
    packs = path_of(strategy).packs_tensors
    if len(local_devices(strategy)) > 1 and packs:
        return _in_variables(strategy, microbatches, one, zeros)
    lists = (lambda sums: sums) if packs else listed
    _, summed = tf.while_loop(
        lambda index, so_far: index < microbatches,
        lambda index, so_far: (index + 1, one(index, so_far)),
        (tf.constant(0), strategy.run(lambda: lists(zeros()))),
        parallel_iterations=_AT_ONCE,
    )
    first = strategy.experimental_local_results(summed)[0]
    if packs or not has_rows(first):
        return summed
    return strategy.run(lambda sums: joined(sums, zeros()), args=(summed,))


def _in_variables(
    strategy: tf.distribute.Strategy,
    microbatches: int,
    one: Callable[[Any, Any], Any],
    zeros: Callable[[], Any],
) -> Any:
    """Adds in variables that live for one update, on the device of each replica.

    A loop carries its tensors on one device, to which all other replicas would send their sums in
    each turn.
    """

    def made() -> list[tf.Tensor]:
        return [
            zero_variable(value) if value.shape.is_fully_defined() else new_variable(value)
            for value in tf.nest.flatten(zeros())
        ]

    def add(handles: list[tf.Tensor], values: Any) -> None:
        like = tf.nest.flatten(zeros())
        for handle, value, zero in zip(handles, tf.nest.flatten(values), like, strict=True):
            value = tf.convert_to_tensor(value)
            if zero.shape.is_fully_defined():
                tf.raw_ops.AssignAddVariableOp(resource=handle, value=value)
            else:  # rows of a sparse gradient
                rows = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
                joined = tf.concat([tf.ensure_shape(rows, zero.shape), value], axis=0)
                tf.raw_ops.AssignVariableOp(resource=handle, value=joined)

    def read(handles: list[tf.Tensor]) -> Any:
        like = zeros()
        values = []
        for handle, value in zip(handles, tf.nest.flatten(like), strict=True):
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
            values.append(tf.ensure_shape(read, value.shape))
            with tf.control_dependencies([read]):
                tf.raw_ops.DestroyResourceOp(resource=handle)
        return tf.nest.pack_sequence_as(like, values)

    variables = strategy.run(made)

    def turn(index: tf.Tensor) -> tuple[tf.Tensor]:
        strategy.run(add, args=(variables, one(index, None)))
        return (index + 1,)

    start = (tf.constant(0),)
    tf.while_loop(lambda index: index < microbatches, turn, start, parallel_iterations=_AT_ONCE)
    return strategy.run(read, args=(variables,))
