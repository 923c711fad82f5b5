"""Batch normalization by TensorFlow's fused operation, on GPUs.

Keras computes moments, normalization and their gradients in dozens of kernels for each layer, the
fused operation in a few, with moments in float32, too. It supports neither masks nor moments
over replicas. ddl does not use it where XLA compiles, because XLA computes E[x²] - E[x]², which
loses precision where the variance is small relative to the mean. Nor does ddl use it on CPUs,
because it rounds differently from Keras's operations.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.distribution.path import path_of

_LARGEST = 2**31  # elements; cuDNN counts them in int32
_MOST_ROWS = 880_801  # of the first dimension; cuDNN fails from here on


def applies_to(layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any) -> bool:
    """Returns whether the fused operation computes what the layer computes in training.

    Args:
      layer: The layer, built.
      inputs: Its inputs, in the compute dtype or another one.
      mask: Its mask.
    """
    current = microbatch.current()
    if current is None or not path_of().fuses_normalization or microbatch.is_compiled():
        return False
    has_mask = mask is not None or current.mask is not None
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return not (
        has_mask
        or current.held_moments is not None
        or layer.renorm
        or (replicas > 1 and not current.own_moments)
        or inputs.dtype not in (tf.float32, tf.float16, tf.bfloat16)
        or inputs.dtype != layer.compute_dtype
        or layer.moving_mean.dtype != "float32"
    ) and _has_a_layout(inputs.shape, layer.axis)


def _has_a_layout(shape: tf.TensorShape, axis: int) -> bool:
    if not shape.is_fully_defined() or shape.num_elements() >= _LARGEST or shape[0] >= _MOST_ROWS:
        return False
    is_last = axis in (-1, shape.rank - 1)
    return shape.rank > 1 and _count(shape, axis) > 1 and (is_last or (shape.rank, axis) == (4, 1))


def _count(shape: tf.TensorShape, axis: int) -> int:
    return shape.num_elements() // max(shape[axis], 1)


def normalized(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> tf.Tensor:
    """Normalizes with the moments of the inputs and moves the layer's moments. Replica context.

    Args:
      layer: A layer to which the operation applies.
      inputs: float32, float16 or bfloat16 [batch, …]; the moments are float32.

    Returns:
      The outputs, in shape and dtype of the inputs.
    """
    shape, count = inputs.shape, _count(inputs.shape, layer.axis)
    channels_last = layer.axis in (-1, shape.rank - 1)
    if channels_last:  # [batch, height, width, channels]
        by_rank = {2: [shape[0], 1, 1], 3: [*shape[:2], 1]}
        sizes = by_rank.get(shape.rank, [*shape[:2], math.prod(shape[2:-1])])
        inputs = tf.reshape(inputs, [*sizes, shape[-1]])
    ones, zeros, none = (tf.ones(shape[layer.axis]), tf.zeros(shape[layer.axis]), tf.zeros([0]))
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=layer.gamma.value if layer.scale else ones,
        offset=layer.beta.value if layer.center else zeros,
        mean=none,
        variance=none,
        # tf.nn.fused_batch_norm raises it to 1.001e-5, the least of earlier versions of cuDNN.
        epsilon=layer.epsilon,
        data_format="NHWC" if channels_last else "NCHW",
        is_training=True,
    )
    # The operation divides by count - 1, Keras by count.
    share = (1 - layer.momentum) * ((count - 1) / count)
    layer.moving_mean.assign(layer.moving_mean * layer.momentum + mean * (1 - layer.momentum))
    layer.moving_variance.assign(layer.moving_variance * layer.momentum + variance * share)
    return tf.reshape(outputs, shape)
