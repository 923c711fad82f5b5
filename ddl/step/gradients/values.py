"""Values of gradients, dense and sparse: multiplied, merged, looked at."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ddl.distribution.path import path_of
from ddl.microbatch import CannotCompileError, is_compiled
from ddl.step.packing import Packed, in_buffers

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def multiply(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """Multiplies each gradient by a scalar, in the gradient's dtype; sparse ones stay sparse."""
    return each(gradients, lambda values: values * tf.cast(factor, values.dtype))


def opaque(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the same gradients as values that TensorFlow's graph optimizer does not look into.

    It merges a product into the product that reads it, if nothing else does. Norms and inner
    products of a step read the gradients of the first replica alone, so the merged products of the
    other replicas would be rounded differently, and their weights would drift apart.
    """
    barrier = tf.raw_ops.PlaceholderWithDefault
    return each(gradients, lambda values: barrier(input=values, shape=values.shape))


def packs(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Returns whether operations on all gradients are faster in few buffers: on GPUs.

    Args:
      strategy: The strategy; None in replica context.
    """
    return path_of(strategy).packs_tensors


def merge_duplicates(gradient: Gradient) -> Gradient:
    """Returns a sparse gradient with duplicate rows added up, and a dense gradient unchanged.

    Several replicas, or several examples, may give rows for the same index. These rows must be
    added before the norm or an optimizer such as Adam squares them; else the result would depend on
    the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def in_pairs(
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], one: Gradient, other: Gradient
) -> Gradient:
    """Returns a function of each pair of entries of two gradients of one variable.

    The result is sparse if both gradients are, and holds each row once.

    Args:
      function: Takes two tensors of one shape; gives 0 for two zeros.
      one: The first gradient.
      other: The second gradient.
    """
    if not isinstance(one, tf.IndexedSlices) or not isinstance(other, tf.IndexedSlices):
        return function(tf.convert_to_tensor(one), tf.convert_to_tensor(other))
    # The one loss may look rows up by int32 ids, the other by int64 ids.
    of_both = [tf.cast(gradient.indices, tf.int64) for gradient in (one, other)]
    indices, segments = tf.unique(tf.concat(of_both, axis=0))
    number = tf.shape(one.indices)[0]
    both = [
        tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(indices)[0])
        for gradient, places in ((one, segments[:number]), (other, segments[number:]))
    ]
    return tf.IndexedSlices(function(*both), indices, one.dense_shape)


def with_each_row_once(gradients: list[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Merges the duplicate rows of sparse gradients, before they are checked or applied.

    Cross-replica context.

    Args:
      gradients: The sum over the replicas of each gradient.
      strategy: The strategy.

    Raises:
      CannotCompileError: If there are sparse gradients within what XLA compiles.
    """
    first = (strategy.experimental_local_results(gradient)[0] for gradient in gradients)
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in first):
        return gradients
    if is_compiled():
        raise CannotCompileError("the number of rows of a sparse gradient depends on the examples")
    return strategy.run(
        lambda own: [merge_duplicates(gradient) for gradient in own], args=(gradients,)
    )


def widest(values: Sequence[Gradient]) -> tf.DType:
    """Returns the widest dtype of the values."""
    return max((value.dtype for value in values), key=lambda dtype: dtype.size)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns the values of a gradient; of a sparse one, those of its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradients: Sequence[Gradient], values: Sequence[tf.Tensor]) -> list[Gradient]:
    """Returns gradients with other values; sparse gradients stay sparse."""
    return [
        tf.IndexedSlices(value, gradient.indices, gradient.dense_shape)
        if isinstance(gradient, tf.IndexedSlices)
        else value
        for gradient, value in zip(gradients, values, strict=True)
    ]


def each(
    gradients: Sequence[Gradient], function: Callable[[tf.Tensor], tf.Tensor]
) -> list[Gradient]:
    """Applies a function of each entry; sparse gradients stay sparse."""
    values = [values_of(gradient) for gradient in gradients]
    if packs():  # few gradients stay alone, unless they share a buffer already
        changed = Packed(values, shared=in_buffers(values)).each(function)
    else:
        changed = [function(value) for value in values]
    return with_values(gradients, changed)
