"""Sums over the replicas, and the rows of all replicas, within a forward pass.

A gather gives each replica the rows of all, in the order of replicas. The gradient of a replica's
rows is the sum of the gradients that all replicas computed for them.

    forward    [b, …] on each of R replicas → [R·b, …] on each     all-gather
    backward   [R·b, …] on each → [b, …] on each                   all-reduce, own rows

Each of the two is the other's gradient, so that a loss may differentiate a gradient. Several
workers, and GPUs, exchange by collectives. The replicas of one process without collectives read
each other's tensors.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, distribute_utils

from ddl.distribution.path import path_of
from ddl.microbatch import CannotCompileError, is_compiled

_SENT = (tf.float16, tf.float32, tf.float64, tf.int64)
"""Dtypes that TensorFlow's all-gather takes on every device."""


def sum_over_replicas(values: tf.Tensor) -> tf.Tensor:
    """Sums a tensor over all replicas. Replica context; all replicas must call it alike.

    Computes what `tf.distribute.ReplicaContext.all_reduce` computes, with the same gradient: the
    gradients of the results, summed over the replicas. Use it in layers of your own, too.
    TensorFlow's function looks at every operation that any replica has traced so far, so that its
    tracing time grows faster than the number of layers that call it.

    Args:
      values: Tensor of a floating or complex dtype, of one shape on all replicas.

    Returns:
      The sum, of the same shape and dtype; on one replica and outside of `strategy.run` the tensor
      itself.

    Example:
      >>> def call(self, inputs):  # of a layer that subtracts the moving mean of earlier batches
      ...     rows = sum_over_replicas(tf.cast(tf.shape(inputs)[0], inputs.dtype))
      ...     mean = sum_over_replicas(tf.reduce_sum(inputs, 0)) / rows
      ...     centered = inputs - self.mean
      ...     self.mean.assign(0.9 * self.mean + 0.1 * mean)
      ...     return centered
    """
    if _is_alone():
        return values
    if is_compiled() and path_of().can_compile:  # TPUs compile collectives, too
        place = tf.compat.v1.get_default_graph().get_name_scope()
        raise CannotCompileError(
            f"{place or 'the task'} sums over the replicas, and collectives stay outside of "
            "compiled code"
        )
    return _summed(values)


def gather_over_replicas(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the rows of all replicas. Replica context; all replicas must call it alike.

    Args:
      values: Tensors [rows, …] of a static shape that is the same on all replicas; of floating,
        integer or bool dtypes.

    Returns:
      Tensors [replicas · rows, …] of the same dtypes, in the order of replicas; on one replica and
      outside of `strategy.run` the tensors themselves.
    """
    if _is_alone():
        return list(values)
    return [_gathered(x) if x.dtype.is_floating else _all_rows(x) for x in values]


def scatter_over_replicas(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums over the replicas of this replica's rows. Replica context, as above.

    Args:
      values: Float tensors [replicas · rows, …], in the order of replicas.

    Returns:
      Tensors [rows, …] of the same dtypes.
    """
    return list(values) if _is_alone() else [_scattered(value) for value in values]


def _is_alone() -> bool:
    context = tf.distribute.get_replica_context()
    return context is None or context.num_replicas_in_sync == 1


# tf.custom_gradient searches the operations between results and arguments for variables. The
# results depend on the other replicas' arguments, too, where the search would go on to the
# beginning of their graphs. It ends at tf.stop_gradient.


@tf.custom_gradient
def _summed(values: tf.Tensor) -> tuple[tf.Tensor, object]:
    return tf.stop_gradient(_total(tf.stop_gradient(values))), _summed


def _total(values: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    if not context.strategy.extended._use_merge_call():  # collectives start in replica context
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    # As in all_reduce, but without a second custom gradient, which takes as long to trace.
    def reduce(strategy: tf.distribute.Strategy, each: tf.Tensor) -> tf.Tensor:
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(each, each)])[0]

    return context.merge_call(reduce, args=(values,))


@tf.custom_gradient
def _gathered(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return _scattered(tf.convert_to_tensor(upstream))

    return tf.stop_gradient(_all_rows(tf.stop_gradient(values))), gradient


@tf.custom_gradient
def _scattered(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return _gathered(tf.convert_to_tensor(upstream))

    return tf.stop_gradient(_own_sums(tf.stop_gradient(values))), gradient


def _all_rows(values: tf.Tensor) -> tf.Tensor:
    """Gathers [b, …] of each replica into [R·b, …]."""
    context = tf.distribute.get_replica_context()
    shape = [context.num_replicas_in_sync * values.shape[0], *values.shape[1:]]
    if not context.strategy.extended._use_merge_call():  # collectives start in replica context
        rows = context.all_gather(_as_sent(values), axis=0)
        return tf.ensure_shape(_as_before(rows, values.dtype), shape)
    return tf.ensure_shape(context.merge_call(_exchange_rows, args=(values,)), shape)


def _own_sums(values: tf.Tensor) -> tf.Tensor:
    """Sums [R·b, …] over the replicas; returns the b rows of this replica."""
    context = tf.distribute.get_replica_context()
    rows = values.shape[0] // context.num_replicas_in_sync
    first = context.replica_id_in_sync_group * rows
    total = _total(tf.cast(values, tf.float32) if values.dtype.size == 2 else values)
    own = tf.cast(total[first : first + rows], values.dtype)
    return tf.ensure_shape(own, [rows, *values.shape[1:]])


def _exchange_rows(strategy: tf.distribute.Strategy, each: Any) -> Any:
    parts = strategy.experimental_local_results(each)
    # Private attributes of TensorFlow, checked by tests/layers/test_across_replicas.py.
    operations = getattr(strategy.extended, "_cross_device_ops", None)
    launchers: Sequence[Any] = [None] * len(parts)
    if isinstance(operations, cross_device_ops.CollectiveAllReduce):
        launchers = operations._launchers
    found = []
    for part, device, launcher in zip(
        parts, strategy.extended.worker_devices, launchers, strict=True
    ):
        with tf.device(device):
            if launcher is None:  # the replicas read each other's tensors
                found.append(tf.concat(parts, axis=0))
            else:
                found.append(_as_before(launcher._all_gather(_as_sent(part), None), part.dtype))
    return distribute_utils.regroup(found)


def _as_sent(values: tf.Tensor) -> tf.Tensor:
    """Returns a tensor of a dtype that the collectives take, which holds the same values."""
    if values.dtype in _SENT:
        return values
    if values.dtype.size == 1:
        return tf.cast(values, tf.float16)  # bool, int8, uint8: exact, in a quarter of the bytes
    if values.dtype == tf.bfloat16:
        return tf.bitcast(values, tf.float16)
    return tf.cast(values, tf.int64)


def _as_before(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `_as_sent`."""
    return tf.bitcast(values, dtype) if dtype == tf.bfloat16 else tf.cast(values, dtype)
