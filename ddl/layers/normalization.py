"""Moments of BatchNormalization over the examples of nonzero weight, on one or all replicas.

Ioffe and Szegedy 2015, "Batch Normalization". In a trainer each BatchNormalization that keeps
Keras's `_moments` takes its moments from this module, whatever its `synchronized` says. They are
those of the global microbatch: padding and other rows of weight 0 are masked out, and each replica
sums squares around its own mean. One all-reduce gathers the sums of all replicas, which give the
moments together (Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing
sample variances"). Keras makes three all-reduces and computes E[x²] - E[x]², which loses precision
where the variance is small relative to the mean.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl import microbatch
from ddl.layers.across_replicas import sum_over_replicas
from ddl.layers.broadcasting import kept_or_zero, with_rank


def has_global_moments(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is a BatchNormalization whose moments `take_over_moments` computes.

    A subclass with a method `_moments` of its own keeps it.
    """
    of_keras = keras.layers.BatchNormalization
    return isinstance(layer, of_keras) and type(layer)._moments is of_keras._moments


def take_over_moments(layers: Iterable[keras.layers.Layer]) -> None:
    """Makes BatchNormalization call `batch_moments` in a trainer; elsewhere Keras's code runs.

    The hook `_moments` is private to Keras; tests/layers/test_normalization.py guards it.
    """
    for layer in filter(has_global_moments, layers):
        layer._moments = functools.partial(_moments, layer)


def warn_of_batch_moments(
    layers: Sequence[keras.layers.Layer], replicas: int, microbatches: int
) -> None:
    """Logs if moments of BatchNormalization depend on the number of replicas or microbatches.

    Args:
      layers: The layers that take moments in training.
      replicas: Number of replicas that take moments of their own rows; 1 for global moments.
      microbatches: Microbatches per replica and update.
    """
    names = ", ".join(layer.name for layer in layers)
    said = "The layers %s take moments of each %s changes the training result."
    if names and replicas > 1:
        why = "replica (Trainer.batch_moments = 'per_replica'), so the number of replicas"
        logging.warning(said, names, why)
    if names and microbatches > 1:
        logging.warning(said, names, f"microbatch, so ACCUMULATION_STEPS = {microbatches}")


def _moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    current = microbatch.current()
    if current is None:
        return type(layer)._moments(layer, inputs, mask)
    found = _in_trainer(layer, inputs, mask, current)
    if current.held is None:
        return found
    current.normalizing.append(layer)
    mean, variance = current.held(found, False)
    return mean, variance


def _in_trainer(
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
    is_alone = current.own_moments or current.held is not None
    over_replicas = not is_alone and tf.distribute.get_strategy().num_replicas_in_sync > 1
    axes = layer._reduction_axes
    without_gradient = current.held is not None
    if mask is None and not over_replicas and (microbatch.is_compiled() or without_gradient):
        return _moments_in_one_pass(inputs, axes)
    moving = layer.moving_mean, layer.moving_variance
    return batch_moments(inputs, axes, mask, moving, over_replicas)


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
    axes: Sequence[int],
    mask: tf.Tensor | None,
    moving: Sequence[Any],
    over_replicas: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes mean and variance of the unmasked entries. Replica context.

    The gradients are written out: TensorFlow would differentiate each operation, and deep models
    have many layers. Second gradients are right, which those of `tf.nn.moments` are not.

    Args:
      inputs: float32 or float64 [batch, …, channels]; the channels may be another axis.
      axes: Axes to reduce: all but the channels.
      mask: bool, of the leading dimensions of the inputs, True for entries to include; None
        includes all.
      moving: Mean and variance, tensors or variables [channels], returned where all entries are
        masked out.
      over_replicas: Whether to include the entries of all replicas, by one all-reduce.

    Returns:
      Mean and variance, [channels], in the dtype of the inputs; with `over_replicas` the same bits
      on all replicas.
    """
    rank = len(inputs.shape)
    (channels_axis,) = set(range(rank)) - set(axes)
    is_counted = None if mask is None else with_rank(mask, rank)
    numbers = _numbers(inputs, axes, mask)
    results: list[tf.Tensor] = []

    def counted(values: tf.Tensor) -> tf.Tensor:
        return values if is_counted is None else kept_or_zero(values, is_counted)

    def along_channels(values: tf.Tensor) -> tf.Tensor:
        return with_rank(values, rank - channels_axis)

    @tf.custom_gradient
    def moments(inputs: tf.Tensor) -> tuple[Any, Any]:
        values = tf.stop_gradient(inputs)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counted(values), axes), numbers)
        distances = counted(values - along_channels(mean))
        squares = tf.reduce_sum(tf.square(distances), axes)
        found = numbers, mean, tf.math.divide_no_nan(squares, numbers)
        if over_replicas:
            residual = tf.reduce_sum(distances, axes)  # not zero: the mean is rounded
            found = _over_replicas(mean, residual, squares, numbers)
        # As in sum_over_replicas: TensorFlow's search for variables ends here.
        return tuple(map(tf.stop_gradient, found)), gradient

    def gradient(_: tf.Tensor, *of_moments: tf.Tensor) -> tf.Tensor:
        total, mean, _ = results  # outside of `moments`, so that it has gradients, too
        stacked = tf.stack(of_moments)
        of_all = sum_over_replicas(stacked) if over_replicas else stacked
        of_each = tf.math.divide_no_nan(of_all, total)
        of_mean, of_variance = map(along_channels, tf.unstack(of_each))
        # Masked first: a masked entry may be infinite, and its gradient times 0 not a number.
        distances = counted(inputs - along_channels(mean))
        return distances * (2 * of_variance) + counted(of_mean)

    results += moments(inputs)
    total, *found = results
    if mask is None:
        return found[0], found[1]
    pairs = zip(found, moving, strict=True)
    mean, variance = (tf.where(total > 0, x, tf.cast(before, x.dtype)) for x, before in pairs)
    return mean, variance


def _numbers(inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None) -> tf.Tensor:
    """Counts the unmasked entries: [1], or [channels] where the mask has a channel dimension."""
    rank = 0 if mask is None else len(mask.shape)
    shape = keras.ops.shape(inputs)
    others = math.prod(shape[axis] for axis in axes if axis >= rank)
    if mask is None:
        return tf.reshape(tf.cast(others, inputs.dtype), [1])
    of_mask = tf.reduce_sum(tf.cast(mask, inputs.dtype), [axis for axis in axes if axis < rank])
    return tf.reshape(of_mask * tf.cast(others, inputs.dtype), [-1])


def _over_replicas(*own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns number, mean and variance of the entries of all replicas.

    Args:
      *own: This replica's rounded mean, [channels]; the sum of the entries' distances from it,
        [channels]; the sum of the squares of these, [channels]; and the number of entries, [1] or
        [channels].
    """
    context = tf.distribute.get_replica_context()
    replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    # A matrix with the row of this replica: adding zeros gathers the rows, and rounds nothing.
    is_own = tf.expand_dims(tf.one_hot(replica, replicas, True, False, dtype=tf.bool), 1)
    rows = sum_over_replicas(tf.where(is_own, tf.concat(own, axis=0), tf.zeros([], own[0].dtype)))
    means, residuals, squares, numbers = tf.split(rows, [each.shape[0] for each in own], axis=1)
    number = tf.reduce_sum(numbers, axis=0)
    sums = tf.reduce_sum(numbers * means + residuals, axis=0)
    mean = tf.math.divide_no_nan(sums, number)
    distances = means - mean
    around_mean = squares + distances * (2 * residuals + numbers * distances)
    variance = tf.math.divide_no_nan(tf.reduce_sum(around_mean, axis=0), number)
    return number, mean, variance
