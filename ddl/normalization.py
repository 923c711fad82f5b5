"""BatchNormalization whose moments are those of the examples that count, wherever they lie.

Ioffe and Szegedy 2015, "Batch Normalization". In a trainer Keras's layer gets its moments from
here: padding and other rows of weight 0 never reach them, and with `synchronized=True` the squares
are summed around the mean, in two all-reduces, where Keras makes three and loses the digits of a
variance that is small beside the mean.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.broadcasting import with_rank


def take_over_moments(layers: Iterable[keras.layers.Layer]) -> None:
    """Makes BatchNormalization ask `batch_moments` within a trainer, and Keras's code elsewhere.

    The hook is private to Keras and held by tests/test_normalization.py.
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
    if mask is not None:
        mask = tf.cast(mask, tf.bool)
    if current.mask is not None:
        rows = keras.ops.shape(inputs)[0]
        each = current.rows_per_example(rows, f"the layer {layer.name!r}, in a batch with padding,")
        of_rows = tf.repeat(current.mask, each)
        mask = of_rows if mask is None else mask & with_rank(of_rows, len(mask.shape))
    if mask is None and not layer.synchronized:
        return type(layer)._moments(layer, inputs, None)
    moving = [tf.cast(v, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance)]
    return batch_moments(inputs, layer._reduction_axes, mask, moving, layer.synchronized)


def batch_moments(
    inputs: tf.Tensor,
    axes: list[int],
    mask: tf.Tensor | None,
    moving: Sequence[tf.Tensor],
    synchronized: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the entries that count. Replica context.

    Args:
      inputs: float32 or float64 [batch, …, channels], or with channels elsewhere.
      axes: Those to reduce, all but the channels.
      mask: bool, the first dimensions of the inputs, True for what counts; None: all does.
      moving: The moments [channels] to give where no entry counts.
      synchronized: Whether to sum over all replicas.

    Returns:
      Mean and variance, [channels].
    """
    (channels_axis,) = set(range(len(inputs.shape))) - set(axes)

    def total(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        if not synchronized or context.num_replicas_in_sync == 1:
            return values
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    def counted(values: tf.Tensor) -> tf.Tensor:
        if mask is None:
            return values
        # Chosen, not multiplied: what does not count may be infinite.
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
    """How many entries count: [1] or, where the mask reaches the channels, [channels]."""
    counted = tf.ones([], inputs.dtype) if mask is None else tf.cast(mask, inputs.dtype)
    rank = len(counted.shape)
    numbers = tf.reduce_sum(counted, [axis for axis in axes if axis < rank])
    shape = keras.ops.shape(inputs)
    others = math.prod(shape[axis] for axis in axes if axis >= rank)
    return tf.reshape(numbers * tf.cast(others, inputs.dtype), [-1])
