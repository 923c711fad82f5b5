"""Moments of BatchNormalization over the examples of nonzero weight, on one or all replicas.

Ioffe and Szegedy 2015, "Batch Normalization". In a trainer Keras's layer takes its moments from
this module. Padding and other rows of weight 0 are masked out. With `synchronized=True` the
squares are summed around the mean, in two all-reduces. Keras makes three all-reduces and computes
E[x²] - E[x]², which loses precision where the variance is small relative to the mean.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.layers.broadcasting import with_rank
from ddl.layers.replica_sum import sum_over_replicas


def take_over_moments(layers: Iterable[keras.layers.Layer]) -> None:
    """Makes BatchNormalization call `batch_moments` in a trainer; elsewhere Keras's code runs.

    The hook `_moments` is private to Keras; tests/layers/test_normalization.py guards it.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer._moments = functools.partial(_moments, layer)


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
        of_rows = tf.repeat(current.mask, each)
        mask = of_rows if mask is None else mask & with_rank(of_rows, len(mask.shape))
    synchronized = layer.synchronized and current.held_moments is None
    if mask is None and not synchronized:
        return type(layer)._moments(layer, inputs, None)
    moving = [tf.cast(v, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance)]
    return batch_moments(inputs, layer._reduction_axes, mask, moving, synchronized)


def batch_moments(
    inputs: tf.Tensor,
    axes: list[int],
    mask: tf.Tensor | None,
    moving: Sequence[tf.Tensor],
    synchronized: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes mean and variance of the unmasked entries. Replica context.

    Args:
      inputs: float32 or float64 [batch, …, channels]; the channels may be another axis.
      axes: Axes to reduce: all but the channels.
      mask: bool, of the leading dimensions of the inputs, True for entries to include; None
        includes all.
      moving: Mean and variance, [channels], returned where all entries are masked out.
      synchronized: Whether to all-reduce the sums over the replicas.

    Returns:
      Mean and variance, [channels], in the dtype of the inputs.
    """
    (channels_axis,) = set(range(len(inputs.shape))) - set(axes)

    def total(values: tf.Tensor) -> tf.Tensor:
        return sum_over_replicas(values) if synchronized else values

    def counted(values: tf.Tensor) -> tf.Tensor:
        if mask is None:
            return values
        # tf.where, not a product: masked entries may be infinite.
        zero = tf.zeros([], values.dtype)
        return tf.where(with_rank(mask, len(inputs.shape)), values, zero)

    numbers = _numbers(inputs, axes, mask)
    sums = total(tf.concat([tf.reduce_sum(counted(inputs), axes), numbers], axis=0))
    sums, numbers = tf.split(sums, [-1, tf.shape(numbers)[0]])
    mean = tf.math.divide_no_nan(sums, numbers)
    distances = inputs - with_rank(mean, len(inputs.shape) - channels_axis)
    squares = total(tf.reduce_sum(tf.square(counted(distances)), axes))
    variance = tf.math.divide_no_nan(squares, numbers)
    if mask is None:
        return mean, variance
    return tf.where(numbers > 0, mean, moving[0]), tf.where(numbers > 0, variance, moving[1])


def _numbers(inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None) -> tf.Tensor:
    """Counts the unmasked entries: [1], or [channels] where the mask has a channel dimension."""
    counted = tf.ones([], inputs.dtype) if mask is None else tf.cast(mask, inputs.dtype)
    rank = len(counted.shape)
    numbers = tf.reduce_sum(counted, [axis for axis in axes if axis < rank])
    shape = keras.ops.shape(inputs)
    others = math.prod(shape[axis] for axis in axes if axis >= rank)
    return tf.reshape(numbers * tf.cast(others, inputs.dtype), [-1])


def has_synchronized_layers(model: keras.Model) -> bool:
    """Returns whether any layer has `synchronized=True`: its forward pass all-reduces."""
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
