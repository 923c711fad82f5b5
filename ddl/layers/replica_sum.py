"""A sum over the replicas within a forward pass, traced in time linear in the model's depth."""

import tensorflow as tf

from ddl.distribution.path import path_of
from ddl.microbatch import CannotCompileError, is_compiled


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
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return values
    if is_compiled() and path_of().can_compile:  # TPUs compile collectives, too
        place = tf.compat.v1.get_default_graph().get_name_scope()
        raise CannotCompileError(
            f"{place or 'the task'} sums over the replicas, and collectives stay outside of "
            "compiled code"
        )
    return _summed(values)


@tf.custom_gradient
def _summed(values: tf.Tensor) -> tuple[tf.Tensor, object]:
    # tf.custom_gradient searches the operations between results and arguments for variables. The
    # results depend on the other replicas' arguments, too, where TensorFlow's search would go on
    # to the beginning of their graphs. It ends at operations without a gradient.
    return tf.stop_gradient(_total(tf.stop_gradient(values))), _summed


def _total(values: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    if not context.strategy.extended._use_merge_call():  # collectives start in replica context
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    # As in all_reduce, but without a second custom gradient, which takes as long to trace.
    def reduce(strategy: tf.distribute.Strategy, each: tf.Tensor) -> tf.Tensor:
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(each, each)])[0]

    return context.merge_call(reduce, args=(values,))
