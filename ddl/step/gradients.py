"""The gradient path after the all-reduce: unscale → clip → apply.

Before it comes the finite check (`ddl.step.overflow`). Both concern the gradient of the global
batch and therefore come after the all-reduce, where every replica holds the same values. Keras 3
clips and checks before the all-reduce, on each replica's own share.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ddl.devices.compiling import CannotCompileError
from ddl.devices.packing import Packed, in_buffers, norm
from ddl.devices.path import path_of
from ddl.errors import ConfigError
from ddl.microbatch import is_compiled
from ddl.optimizers.checks import check_holds_none, check_optimizer, check_unused

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def prepare_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> None:
    """Builds the optimizer's slots and removes the all-reduce from its `apply`.

    Keras's `apply` sums gradients over the replicas, without an option to skip it. This function
    replaces the instance's hook for the all-reduce by the identity. The hook is private to Keras
    and checked by tests/step/test_gradients.py.

    Args:
      optimizer: The optimizer; changed in place.
      variables: The trained variables.
      strategy: The strategy in whose scope the optimizer was made.

    Raises:
      ConfigError: If `check_optimizer`, `check_unused` or `check_holds_none` rejects the optimizer,
        or if it was made outside the strategy's scope.
    """
    check_optimizer(optimizer)
    if not strategy.extended.variable_created_in_scope(optimizer.iterations.value):
        raise ConfigError(
            f"The optimizer {optimizer.name!r} was created outside the strategy's scope. Create it "
            "under `with strategy.scope():`, like the model."
        )
    check_unused(optimizer, variables)
    with strategy.scope():
        optimizer.build(variables)
    check_holds_none(optimizer)
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def check_used(unused: Sequence[keras.Variable]) -> None:
    """Raises ConfigError if there are trainable variables on which the loss does not depend."""
    if unused:
        raise ConfigError(
            "The loss does not depend on the trainable variables "
            f"{', '.join(v.path for v in unused)}. Remove them from the model, or set trainable = "
            "False on their layers."
        )


def left_out(
    watched: Sequence[tf.Variable],
    variables: Sequence[keras.Variable],
    own: Sequence[tf.Variable],
    complete: Sequence[keras.Variable] | None,
) -> list[tf.Variable]:
    """Returns the watched variables that are neither updated nor frozen. Replica context.

    Args:
      watched: Variables that a loss reads.
      variables: Variables that are updated.
      own: As in `GlobalGradient`, like `complete`.
      complete: See `own`.

    Raises:
      ConfigError: If a loss of a step reads a trainable variable that nothing updates.
    """
    if complete is None:
        of_task = {id(v.handle) for v in own}
        if stay := [v.name for v in watched if id(v.handle) in of_task]:
            raise ConfigError(
                f"A loss reads the trainable variables {', '.join(stay)} of the task, but the step "
                "does not update them. Pass them to update.minimize as keras.Variable, or make "
                "them with trainable=False."
            )
        return []
    known = {id(v.value.handle) for v in (*variables, *complete)}
    return [v for v in watched if id(v.handle) not in known]


def check_none_left_out(
    others: Sequence[tf.Variable], gradients: Sequence[Gradient | None]
) -> None:
    """Raises ConfigError if the loss has gradients of variables that nothing updates."""
    stay = [v.name for v, g in zip(others, gradients, strict=True) if g is not None]
    if stay:
        raise ConfigError(
            f"The loss depends on the trainable variables {', '.join(stay)}, which are not "
            "part of the task's model, so nothing updates them. Add their layers to the "
            "model, or keep them on an attribute of the task with trainable = False."
        )


def multiply(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """Multiplies each gradient by a scalar, in the gradient's dtype; sparse ones stay sparse."""
    return _each(gradients, lambda values: values * tf.cast(factor, values.dtype))


def packs(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Returns whether operations on all gradients are faster in few buffers: on GPUs.

    Args:
      strategy: The strategy; None in replica context.
    """
    return path_of(strategy).packs_tensors


def clip_by_global_norm(
    gradients: Sequence[Gradient], clip_norm: float, squared: tf.Tensor | None = None
) -> tuple[list[Gradient], tf.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `clip_norm`.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Args:
      gradients: The gradients of the global batch, after the all-reduce. Sparse gradients hold
        each row once (`merge_duplicates`).
      clip_norm: The largest norm allowed.
      squared: The squared global norm; None computes that of all gradients.

    Returns:
      The clipped gradients, and the norm before clipping: a scalar in the widest dtype of
      the gradients.
    """
    own = global_norm(gradients) if squared is None else tf.sqrt(squared)
    # Below the limit the factor is exactly one, so clipping rounds nothing.
    limit = tf.constant(clip_norm, own.dtype)  # tf.cast rounds to float32 first
    return multiply(gradients, limit / tf.maximum(own, limit)), own


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the global norm: a scalar in the widest dtype of the gradients.

    Args:
      gradients: As in `clip_by_global_norm`.
    """
    values = [values_of(gradient) for gradient in gradients]
    wide = widest(gradients)
    if not packs() or any(value.dtype != wide or wide.size < 4 for value in values):
        return tf.sqrt(squared_norm(gradients))
    # The square root is taken in the kernel that adds.
    norms = [norm(buffer) for buffer in Packed(values, shared=True).buffers]
    return norms[0] if len(norms) == 1 else norm(tf.stack(norms))


def squared_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the squared global norm: a scalar in the widest dtype of the gradients.

    Args:
      gradients: As in `clip_by_global_norm`.
    """
    wide = widest(gradients)
    values = [values_of(gradient) for gradient in gradients]
    if packs():
        values = Packed(values, shared=True).buffers
    halves = [tf.cast(tf.nn.l2_loss(value), wide) for value in values]
    return 2 * (halves[0] if len(halves) == 1 and packs() else tf.reduce_sum(tf.stack(halves)))


def clip_by_value(gradients: Sequence[Gradient], clip_value: float) -> list[Gradient]:
    """Clips each entry to [-clip_value, clip_value].

    Args:
      gradients: As in `clip_by_global_norm`.
      clip_value: The largest absolute value allowed.
    """
    return _each(gradients, lambda values: tf.clip_by_value(values, -clip_value, clip_value))


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


def add_regularization(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
) -> list[Gradient]:
    """Adds the gradients of the variables' own regularizers, such as L2. Replica context.

    These gradients depend on the weights alone, so every replica computes them without an
    all-reduce. They are added once after the all-reduce, so their scale does not depend on the
    number of replicas or microbatches.
    """
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return list(gradients)
    with tf.GradientTape() as tape:
        penalties = [v.regularizer(v) for v in regularized]
        penalty = tf.add_n([tf.cast(p, widest(penalties)) for p in penalties])
    extra = iter(tape.gradient(penalty, [v.value for v in regularized]))
    return [
        tf.convert_to_tensor(gradient) + next(extra) if variable.regularizer else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


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


def _each(
    gradients: Sequence[Gradient], function: Callable[[tf.Tensor], tf.Tensor]
) -> list[Gradient]:
    """Applies a function of each entry; sparse gradients stay sparse."""
    values = [values_of(gradient) for gradient in gradients]
    if packs():  # few gradients stay alone, unless they share a buffer already
        changed = Packed(values, shared=in_buffers(values)).each(function)
    else:
        changed = [function(value) for value in values]
    return with_values(gradients, changed)
