"""BatchNormalization whose moments are those of the examples that count, wherever they lie.

Ioffe and Szegedy 2015, "Batch Normalization". In a trainer Keras's layer gets its moments from
here: padding and other rows of weight 0 never reach them, and `synchronized=True` costs one
all-reduce a layer where Keras makes three.
"""

import functools
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError


def take_over_moments(layer: keras.layers.BatchNormalization) -> None:
    """Makes the layer ask `batch_moments` within a trainer, and Keras's own code elsewhere.

    The hook is private to Keras and held by tests/test_normalization.py.
    """
    layer._moments = functools.partial(_moments, layer)


def _moments(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    current = microbatch.current()
    all_count = mask is None and (current is None or current.counts is None)
    if current is None or (all_count and not layer.synchronized):
        return type(layer)._moments(layer, inputs, mask)
    counts = None if mask is None else tf.cast(mask, tf.bool)
    if current.counts is not None:
        rows = _of_rows(current, inputs)
        counts = rows if counts is None else counts & _with_rank(rows, len(counts.shape))
    moving = [tf.cast(v, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance)]
    return batch_moments(inputs, layer._reduction_axes, counts, moving, layer.synchronized)


def batch_moments(
    inputs: tf.Tensor,
    axes: list[int],
    counts: tf.Tensor | None,
    moving: Sequence[tf.Tensor],
    synchronized: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the entries that count. Replica context.

    Args:
      inputs: float32 or float64 [batch, …, channels], or with channels elsewhere.
      axes: Those to reduce, all but the channels.
      counts: bool, the first dimensions of the inputs; None if every entry counts.
      moving: The moments [channels] to give where no entry counts. Around this mean, too, the
        squares are summed, which keeps digits that a sum around 0 would lose (Chan et al.
        1983, "Algorithms for computing the sample variance").
      synchronized: Whether to sum over all replicas. `moving` must then be the same on each.

    Returns:
      Mean and variance, [channels].
    """
    (channels_axis,) = set(range(len(inputs.shape))) - set(axes)
    center = tf.stop_gradient(moving[0])
    after_channels = len(inputs.shape) - channels_axis - 1
    deviations = inputs - _with_rank(center, 1 + after_channels)
    if counts is not None:
        # Chosen, not multiplied: what does not count may be infinite.
        chosen = _with_rank(counts, len(inputs.shape))
        deviations = tf.where(chosen, deviations, tf.zeros([], inputs.dtype))
    sums = [
        tf.reduce_sum(deviations, axes),
        tf.reduce_sum(deviations * deviations, axes),
        _numbers(inputs, axes, counts),
    ]
    context = tf.distribute.get_replica_context()
    if synchronized and context.num_replicas_in_sync > 1:
        sizes = [tf.shape(part)[0] for part in sums]
        packed = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.concat(sums, axis=0))
        sums = tf.split(packed, sizes)
    mean = tf.math.divide_no_nan(sums[0], sums[2])
    variance = tf.maximum(tf.math.divide_no_nan(sums[1], sums[2]) - mean * mean, 0.0)
    if counts is None:
        return center + mean, variance
    some = sums[2] > 0
    return tf.where(some, center + mean, moving[0]), tf.where(some, variance, moving[1])


def _of_rows(current: microbatch.Microbatch, inputs: tf.Tensor) -> tf.Tensor:
    """Which rows of the inputs count: bool [rows]. They hold examples, or parts of them in order.

    Raises:
      ConfigError: If it cannot be known which example a row belongs to.
    """
    rows = inputs.shape[0]
    if rows == current.rows:
        return current.counts
    if rows is None or rows % current.rows:
        raise ConfigError(
            f"BatchNormalization was given {rows} rows for {current.rows} examples, some of which "
            "are padding: which rows they are cannot be known. Keep the batch as the first "
            "dimension."
        )
    return tf.repeat(current.counts, rows // current.rows)


def _numbers(inputs: tf.Tensor, axes: Sequence[int], counts: tf.Tensor | None) -> tf.Tensor:
    """How many entries count: [1] or, where that depends on the channel, [channels]."""
    counted = tf.ones([], inputs.dtype) if counts is None else tf.cast(counts, inputs.dtype)
    rank = len(counted.shape)
    numbers = tf.reduce_sum(counted, [axis for axis in axes if axis < rank])
    shape = keras.ops.shape(inputs)
    others = math.prod(shape[axis] for axis in axes if axis >= rank)
    return tf.reshape(numbers * tf.cast(others, inputs.dtype), [-1])


def _with_rank(values: tf.Tensor, rank: int) -> tf.Tensor:
    """The same values with dimensions of one after their own."""
    return tf.reshape(values, [*keras.ops.shape(values), *[1] * (rank - len(values.shape))])
