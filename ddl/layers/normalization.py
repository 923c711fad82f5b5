"""Moments of BatchNormalization over the examples of nonzero weight, on one or all replicas.

Ioffe and Szegedy 2015, "Batch Normalization". In a trainer Keras's layer takes its moments from
this module. Padding and other rows of weight 0 are masked out. With `synchronized=True` each
replica sums squares around its own mean. One all-reduce gathers the moments of all replicas, which
give the moments of the global batch (Chan et al. 1979, "Updating formulae and a pairwise algorithm
for computing sample variances"). With many replicas these would be
many bytes, so two all-reduces add them instead. Keras makes three all-reduces and computes
E[x²] - E[x]², which loses precision where the variance is small relative to the mean.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.layers import fused_normalization
from ddl.layers.broadcasting import with_rank
from ddl.layers.masking import kept_or_zero
from ddl.layers.replica_sum import sum_over_replicas

_MomentsOf: TypeAlias = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

_MOST_GATHERED = 16
"""Replicas whose moments one all-reduce gathers; it sends the moments of each to all."""


def take_over_moments(layers: Iterable[keras.layers.Layer]) -> None:
    """Makes BatchNormalization call `batch_moments` in a trainer; elsewhere Keras's code runs.

    Where `fused_normalization` applies, it takes the place of the layer's whole call in training.
    The hook `_moments` is private to Keras; tests/layers/test_normalization.py guards it.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer._moments = functools.partial(_moments, layer)
            if _is_keras_s(layer):
                layer.call = functools.partial(_call, layer)


def _is_keras_s(layer: keras.layers.BatchNormalization) -> bool:
    """Returns whether the layer computes what Keras's class does; a subclass may not."""
    of_layer, of_keras = type(layer), keras.layers.BatchNormalization
    return of_layer.call is of_keras.call and of_layer._moments is of_keras._moments


def _call(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> Any:
    # XLA and the fused operation: see there.
    if training and layer.trainable and fused_normalization.applies_to(layer, inputs, mask):
        return fused_normalization.normalized(layer, inputs)
    return type(layer).call(layer, inputs, training=training, mask=mask)


def _moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    current = microbatch.current()
    if current is None:
        return type(layer)._moments(layer, inputs, mask)
    if current.held_moments is not None:
        return current.held_moments(layer, lambda: _moments_of(layer, inputs, mask, current))
    return _moments_of(layer, inputs, mask, current)


def _moments_of(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
    current: microbatch.Microbatch,
) -> tuple[tf.Tensor, tf.Tensor]:
    if mask is not None:
        mask = tf.cast(mask, tf.bool)
    if current.mask is not None:
        rows = keras.ops.shape(inputs)[0]
        each = current.rows_per_example(rows, f"Layer {layer.name!r}, in a batch with padding,")
        of_rows = current.mask if each == 1 else tf.repeat(current.mask, each)
        mask = of_rows if mask is None else mask & with_rank(of_rows, len(mask.shape))
    synchronized = layer.synchronized and current.held_moments is None
    communicates = synchronized and tf.distribute.get_strategy().num_replicas_in_sync > 1
    if mask is None and not communicates and microbatch.is_compiled() and _is_keras_s(layer):
        return _moments_in_one_pass(inputs, layer._reduction_axes)
    if mask is None and not synchronized:
        return type(layer)._moments(layer, inputs, None)
    moving = layer.moving_mean, layer.moving_variance
    return batch_moments(inputs, layer._reduction_axes, mask, moving, synchronized)


def _moments_in_one_pass(inputs: tf.Tensor, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes mean and variance of all entries, [channels] each, in one pass over the inputs.

    XLA makes one kernel of the sums of distances and of their squares. The distances are those from
    one of the entries, so that no precision is lost where a mean is large (Chan et al. 1983,
    "Algorithms for computing the sample variance", on shifted data).
    """
    sizes = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
    origin = tf.stop_gradient(tf.slice(inputs, [0] * len(sizes), sizes))
    distances = inputs - origin
    mean = tf.reduce_mean(distances, axes)
    variance = tf.reduce_mean(tf.square(distances), axes) - tf.square(mean)
    return mean + tf.reshape(origin, [-1]), tf.maximum(variance, 0)


def batch_moments(
    inputs: tf.Tensor,
    axes: list[int],
    mask: tf.Tensor | None,
    moving: Sequence[Any],
    synchronized: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes mean and variance of the unmasked entries. Replica context.

    Args:
      inputs: float32 or float64 [batch, …, channels]; the channels may be another axis.
      axes: Axes to reduce: all but the channels.
      mask: bool, of the leading dimensions of the inputs, True for entries to include; None
        includes all.
      moving: Mean and variance, tensors or variables [channels], returned where all entries are
        masked out.
      synchronized: Whether to all-reduce the sums over the replicas.

    Returns:
      Mean and variance, [channels], in the dtype of the inputs.
    """
    (channels_axis,) = set(range(len(inputs.shape))) - set(axes)
    is_counted = None if mask is None else with_rank(mask, len(inputs.shape))
    before = [] if mask is None else [tf.cast(value, inputs.dtype) for value in moving]

    def counted(values: tf.Tensor) -> tf.Tensor:
        return values if is_counted is None else kept_or_zero(values, is_counted)

    def moments(numbers: tf.Tensor, mean: tf.Tensor, squares: tf.Tensor) -> tuple[Any, Any]:
        variance = tf.math.divide_no_nan(squares, numbers)
        if mask is None:
            return mean, variance
        return tf.where(numbers > 0, mean, before[0]), tf.where(numbers > 0, variance, before[1])

    def along_channels(values: tf.Tensor) -> tf.Tensor:
        return with_rank(values, len(inputs.shape) - channels_axis)

    numbers = _numbers(inputs, axes, mask)
    context = tf.distribute.get_replica_context() if synchronized else None
    if context is not None and context.num_replicas_in_sync > 1:
        return _over_replicas(inputs, axes, numbers, counted, along_channels, moments)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counted(inputs), axes), numbers)
    distances = counted(inputs - along_channels(mean))
    return moments(numbers, mean, tf.reduce_sum(tf.square(distances), axes))


def _numbers(inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None) -> tf.Tensor:
    """Counts the unmasked entries: [1], or [channels] where the mask has a channel dimension."""
    rank = 0 if mask is None else len(mask.shape)
    shape = keras.ops.shape(inputs)
    others = math.prod(shape[axis] for axis in axes if axis >= rank)
    if mask is None:
        return tf.reshape(tf.cast(others, inputs.dtype), [1])
    of_mask = tf.reduce_sum(tf.cast(mask, inputs.dtype), [axis for axis in axes if axis < rank])
    return tf.reshape(of_mask * tf.cast(others, inputs.dtype), [-1])


def _over_replicas(
    inputs: tf.Tensor,
    axes: Sequence[int],
    numbers: tf.Tensor,
    counted: Callable[[tf.Tensor], tf.Tensor],
    along_channels: Callable[[tf.Tensor], tf.Tensor],
    moments_of: _MomentsOf,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of the unmasked entries of all replicas.

    Their gradients are written out: TensorFlow would differentiate each operation, and deep models
    have many layers.

    Args:
      inputs: The inputs of this replica, [batch, …, channels].
      axes: Axes to reduce.
      numbers: Number of unmasked entries, [1] or [channels].
      counted: Replaces masked entries by zeros.
      along_channels: Gives [channels] the rank of the inputs.
      moments_of: Takes number, mean and sum of squares of all entries; returns mean and variance.
    """
    results: list[tf.Tensor] = []

    @tf.custom_gradient
    def moments(inputs: tf.Tensor) -> tuple[Any, Any]:
        values = tf.stop_gradient(inputs)
        origin = tf.math.divide_no_nan(tf.reduce_sum(counted(values), axes), numbers)
        distances = counted(values - along_channels(origin))
        squares = tf.reduce_sum(tf.square(distances), axes)
        # Not zero: what the rounding of the mean left over.
        residual = tf.reduce_sum(distances, axes)
        found = _added(numbers, origin, residual, squares, moments_of)
        # As in sum_over_replicas: TensorFlow's search for variables ends here.
        return tuple(map(tf.stop_gradient, found)), gradient

    def gradient(_: tf.Tensor, *of_moments: tf.Tensor) -> tf.Tensor:
        total, mean, _ = results  # outside of `moments`, so that it has gradients, too
        of_each = tf.math.divide_no_nan(sum_over_replicas(tf.stack(of_moments)), total)
        of_mean, of_variance = map(along_channels, tf.unstack(of_each))
        # Masked first: a masked entry may be infinite, and its gradient times 0 not a number.
        distances = counted(inputs - along_channels(mean))
        return distances * (2 * of_variance) + counted(of_mean)

    results += moments(inputs)
    return results[1], results[2]


def _added(
    numbers: tf.Tensor,
    mean: tf.Tensor,
    residual: tf.Tensor,
    squares: tf.Tensor,
    moments_of: _MomentsOf,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns numbers, mean and variance of all replicas together.

    Args:
      numbers: Number of entries of this replica, [1] or [channels].
      mean: Their mean, rounded, [channels].
      residual: The sum of their distances from it, [channels].
      squares: The sum of the squares of these distances, [channels].
      moments_of: As in `_over_replicas`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > _MOST_GATHERED:
        channels = mean.shape[0]
        totals = sum_over_replicas(tf.concat([numbers * mean + residual, numbers], axis=0))
        overall = tf.math.divide_no_nan(totals[:channels], totals[channels:])
        own = _squares_around(overall, numbers, mean, residual, squares)
        return totals[channels:], *moments_of(totals[channels:], overall, sum_over_replicas(own))
    own = tf.concat([mean, residual, squares, numbers], axis=0)
    # A matrix with the row of this replica: adding zeros gathers the rows, and rounds nothing.
    replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    is_own = tf.expand_dims(tf.one_hot(replica, replicas, True, False, dtype=tf.bool), 1)
    rows = sum_over_replicas(tf.where(is_own, own, tf.zeros([], own.dtype)))
    sizes = [mean.shape[0]] * 3 + [-1]
    each_mean, each_residual, each_squares, each_number = tf.split(rows, sizes, axis=1)
    numbers = tf.reduce_sum(each_number, axis=0)
    sums = tf.reduce_sum(each_number * each_mean + each_residual, axis=0)
    mean = tf.math.divide_no_nan(sums, numbers)
    each = _squares_around(mean, each_number, each_mean, each_residual, each_squares)
    return numbers, *moments_of(numbers, mean, tf.reduce_sum(each, axis=0))


def _squares_around(
    point: tf.Tensor, numbers: tf.Tensor, mean: tf.Tensor, residual: tf.Tensor, squares: tf.Tensor
) -> tf.Tensor:
    """Returns the sum of squares around another point than the mean; see `_added`."""
    distance = mean - point
    return squares + distance * (2 * residual + numbers * distance)


def has_synchronized_layers(model: keras.Model) -> bool:
    """Returns whether any layer has `synchronized=True`: its forward pass all-reduces."""
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
