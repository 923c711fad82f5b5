"""The gradient path after the all-reduce: unscale → finite? → clip → apply.

Its order is the point. Clipping and the question "is it finite?" concern the gradient of the
global batch, so they come after the all-reduce, where every replica holds the same values and
gives the same answer. Keras 3 does both before it, on each replica's own share.
"""

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from ddl.errors import ConfigError

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

# Keras optimizer arguments that act per replica, before the all-reduce or per micro-step, and
# what to do instead.
_OURS_INSTEAD = {
    "clipnorm": "use the trainer's clip_norm, of the global gradient",
    "global_clipnorm": "use the trainer's clip_norm",
    "clipvalue": "use the trainer's clip_value",
    "gradient_accumulation_steps": "use the trainer's accumulation_steps",
    "use_ema": "use the trainer's weight_average, which moves once an update",
    "loss_scale_factor": "use the trainer's loss_scale",
}


def prepare_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> None:
    """Builds the optimizer's slots and takes the all-reduce out of its `apply`.

    Keras's `apply` sums gradients over the replicas by itself and offers no way to say that
    they have been summed already. So this instance's hook for it is made the identity; that is
    private to Keras and held by tests/test_gradients.py.

    Raises:
      ConfigError: If the optimizer was made with an argument that Keras carries out before the
        all-reduce, wraps another one for loss scaling, or was made outside the strategy's scope.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            "the optimizer is a keras LossScaleOptimizer, which asks for overflow on replica 0 "
            "alone. Give the optimizer inside it, and the loss scale to the trainer."
        )
    for argument, ours in _OURS_INSTEAD.items():
        if getattr(optimizer, argument, None):
            raise ConfigError(
                f"the optimizer {optimizer.name!r} was made with {argument}, which Keras carries "
                f"out on each replica by itself. Leave it out; {ours}."
            )
    if not strategy.extended.variable_created_in_scope(optimizer.iterations.value):
        raise ConfigError(
            f"the optimizer {optimizer.name!r} was made outside the strategy's scope. Make it "
            "under `with strategy.scope():`, as the model."
        )
    with strategy.scope():
        optimizer.build(variables)
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def each_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Which gradients hold neither an infinity nor a NaN: bool [gradients]."""
    return tf.stack([tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients])


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Whether no gradient holds an infinity or a NaN: bool []."""
    return tf.reduce_all(each_finite(gradients))


def multiply(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """Each gradient times a scalar, in the gradient's dtype; sparse ones stay sparse."""
    return [
        _with_values(gradient, _values(gradient) * tf.cast(factor, gradient.dtype))
        for gradient in gradients
    ]


def clip_by_global_norm(
    gradients: Sequence[Gradient], clip_norm: float
) -> tuple[list[Gradient], tf.Tensor]:
    """Scales all gradients together so that their joint norm is at most `clip_norm`.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Args:
      gradients: The gradients of the global batch, after the all-reduce, sparse ones with each
        row once (`merge_duplicates`).
      clip_norm: The largest norm allowed.

    Returns:
      The clipped gradients, and the norm before clipping: a scalar in the widest dtype of
      the gradients.
    """
    norm = tf.sqrt(squared_norm(gradients))
    # Below the limit the factor is exactly one, so that nothing is rounded.
    limit = tf.cast(clip_norm, norm.dtype)
    return multiply(gradients, limit / tf.maximum(norm, limit)), norm


def squared_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """The square of the joint norm, sparse gradients with each row once; in their widest dtype."""
    widest = _widest(gradients)
    return 2 * tf.add_n([tf.cast(tf.nn.l2_loss(_values(g)), widest) for g in gradients])


def clip_by_value(gradients: Sequence[Gradient], clip_value: float) -> list[Gradient]:
    """Moves each entry into [-clip_value, clip_value].

    Args:
      gradients: As in `clip_by_global_norm`.
      clip_value: The largest absolute value allowed.
    """
    return [
        _with_values(g, tf.clip_by_value(_values(g), -clip_value, clip_value)) for g in gradients
    ]


def merge_duplicates(gradient: Gradient) -> Gradient:
    """A sparse gradient with each row once; a dense one as it is.

    Replicas send rows for the same index each, and so does one batch: they must be added before
    any square is taken of them, by the norm or by an optimizer such as Adam, or the result would
    depend on the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def add_regularization(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
) -> list[Gradient]:
    """Adds the gradients of the variables' own regularizers, such as L2. Replica context.

    They depend on the weights alone, so every replica has them without a reduce, and adding
    them once, after it, scales them by one whatever the number of replicas and microbatches.
    """
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return list(gradients)
    with tf.GradientTape() as tape:
        penalties = [v.regularizer(v) for v in regularized]
        penalty = tf.add_n([tf.cast(p, _widest(penalties)) for p in penalties])
    extra = iter(tape.gradient(penalty, [v.value for v in regularized]))
    return [
        tf.convert_to_tensor(gradient) + next(extra) if variable.regularizer else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _widest(values: Sequence[Gradient]) -> tf.DType:
    return max((value.dtype for value in values), key=lambda dtype: dtype.size)


def _values(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values
