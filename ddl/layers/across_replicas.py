"""Sums over the replicas, and the rows of all replicas, within a forward pass.

A gather gives each replica the rows of all, in the order of replicas. The gradient of a replica's
rows is the sum of the gradients that all replicas computed for them.

    forward    [b, …] on each of R replicas → [R·b, …] on each     all-gather
    backward   [R·b, …] on each → [b, …] on each                   reduce-scatter

Each of the two is the other's gradient, so that a loss may differentiate a gradient. Several
workers, and GPUs, exchange by collectives, which send each row once. The replicas of one process
without collectives read each other's tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, distribute_utils
from tensorflow.python.ops import collective_ops

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
    replicas = context.num_replicas_in_sync
    rows = values.shape[0] // replicas
    shape = [rows, *values.shape[1:]]
    if not context.strategy.extended._use_merge_call():
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        first = context.replica_id_in_sync_group * rows
        return tf.ensure_shape(total[first : first + rows], shape)
    return tf.ensure_shape(context.merge_call(_exchange_sums, args=(values,)), shape)


def _exchange_rows(strategy: tf.distribute.Strategy, each: Any) -> Any:
    parts = strategy.experimental_local_results(each)

    def on_replica(place: int, launcher: Any) -> tf.Tensor:
        if launcher is None:
            return tf.concat(parts, axis=0)
        sent = _as_sent(parts[place])
        return _as_before(launcher._all_gather(sent, None), parts[place].dtype)

    return _on_each_device(strategy, on_replica)


def _exchange_sums(strategy: tf.distribute.Strategy, each: Any) -> Any:
    parts = strategy.experimental_local_results(each)
    replicas = strategy.num_replicas_in_sync
    rows = parts[0].shape[0] // replicas
    dtype = parts[0].dtype
    wide = tf.float32 if dtype.size == 2 else dtype

    def on_replica(place: int, launcher: Any) -> tf.Tensor:
        if launcher is None:
            own = [part[place * rows : (place + 1) * rows] for part in parts]
        else:
            sent = _as_sent(tf.reshape(parts[place], [replicas, -1]))
            flat = _as_before(_all_to_all(launcher, sent), dtype)
            own = [
                tf.reshape(row, [rows, *parts[place].shape[1:]])
                for row in tf.unstack(flat, replicas)
            ]
        return tf.cast(tf.add_n([tf.cast(one, wide) for one in own]), dtype)

    return _on_each_device(strategy, on_replica)


def _on_each_device(
    strategy: tf.distribute.Strategy, on_replica: Callable[[int, Any], tf.Tensor]
) -> Any:
    """Calls a function on the device of each replica of this process; returns the values.

    Args:
      strategy: The strategy. Cross-replica context.
      on_replica: Takes the replica's place in this process and its launcher of collectives, or
        None if the replicas read each other's tensors.
    """
    devices = strategy.extended.worker_devices
    # Private attributes of TensorFlow, checked by tests/layers/test_across_replicas.py.
    operations = getattr(strategy.extended, "_cross_device_ops", None)
    launchers: Sequence[Any] = [None] * len(devices)
    if isinstance(operations, cross_device_ops.CollectiveAllReduce):
        launchers = operations._launchers
    values = []
    for place, (device, launcher) in enumerate(zip(devices, launchers, strict=True)):
        with tf.device(device):
            values.append(on_replica(place, launcher))
    return distribute_utils.regroup(values)


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


def _all_to_all(launcher: Any, rows: tf.Tensor) -> tf.Tensor:
    """Sends row j of `rows`, [replicas, n], to replica j; returns [replicas, n]."""
    options = launcher._options
    return collective_ops.all_to_all_v2(
        rows,
        launcher._group_size,
        launcher._group_key,
        launcher._next_instance_key(),
        communication_hint=options.implementation.value,
        ordering_token=launcher._get_ordering_token(),
    )
