"""Applying gradients to shares: penalties → clipping → optimizers → whole weights."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.step import gradients as gradient_path
from ddl.step.compiled.compiler import Compiler
from ddl.step.sharding.in_shares import InShares
from ddl.step.sharding.optimizers import Sharding, free
from ddl.step.sharding.shares import gathered, own_share


def apply_to_shares(
    sharding: Sharding,
    gradients: list[Any] | InShares,
    factor: tf.Tensor | None,
    variables: Sequence[keras.Variable],
    parts: Sequence[Any],
    clip: float | None,
    step: tf.Tensor,
    compiler: Compiler,
) -> tf.Tensor:
    """Applies a gradient to each replica's share. Cross-replica context, in a graph.

    Args:
      sharding: The shares.
      gradients: The gradient, whole or in shares.
      factor: A factor that is missing in it, or None; see `ddl.step.applying.apply`, like all that
        follow.
      variables: The variables.
      parts: The optimizers and what each updates.
      clip: The largest global norm, or None.
      step: Number of updates made before this one, int64 [].
      compiler: Compiles the optimizers' computation, or not.

    Returns:
      The global norm before clipping, float64 [].
    """
    shares = gradients.values if isinstance(gradients, InShares) else sharding.cut(gradients)
    if factor is not None:
        shares = sharding.strategy.run(gradient_path.multiply, args=(shares, factor))
    shares = _with_penalties(sharding, shares, variables)
    shares, norm = _clipped(sharding, shares, variables, parts, clip, step)
    for part in parts:
        own = functools.partial(_update, sharding, shares, variables, part, compiler)
        part.unless_frozen(step, own)
    return norm


def _with_penalties(
    sharding: Sharding, shares: list[Any], variables: Sequence[keras.Variable]
) -> list[Any]:
    """Adds the gradients of the variables' regularizers, each of the whole weight."""
    if all(variable.regularizer is None for variable in variables):
        return shares

    def add(own: list[tf.Tensor]) -> list[tf.Tensor]:
        extra = gradient_path.of_penalties(variables)
        return [
            share if penalty is None else share + own_share(penalty)
            for share, penalty in zip(own, extra, strict=True)
        ]

    return list(sharding.strategy.run(add, args=(shares,)))


def _clipped(
    sharding: Sharding,
    shares: list[Any],
    variables: Sequence[keras.Variable],
    parts: Sequence[Any],
    clip: float | None,
    step: tf.Tensor,
) -> tuple[list[Any], tf.Tensor]:
    """Returns clipped gradients, and the norm of `apply_to_shares`."""
    run = sharding.strategy.run
    norm = tf.zeros([], tf.float64)

    def squares(own: list[tf.Tensor]) -> tf.Tensor:
        of_parts = [[own[place] for place in part.places] for part in parts]
        return tf.stack([tf.cast(gradient_path.squared_norm(one), tf.float64) for one in of_parts])

    if clip is not None:
        of_parts = sharding.total(run(squares, args=(shares,)))
        active = tf.stack([step >= part.frozen_until for part in parts])
        squared = tf.reduce_sum(tf.where(active, of_parts, tf.zeros_like(of_parts)))
        norm = tf.sqrt(squared)
        widest = gradient_path.widest([variable.value for variable in variables])

        def clipped(own: list[tf.Tensor], squared: tf.Tensor) -> list[Any]:
            return gradient_path.clip_by_global_norm(own, clip, squared)[0]

        shares = run(clipped, args=(shares, tf.cast(squared, widest)))
    return list(shares), norm


def _update(
    sharding: Sharding,
    shares: list[Any],
    variables: Sequence[keras.Variable],
    part: Any,
    compiler: Compiler,
) -> None:
    """Lets an optimizer update its share of its weights, and gathers the weights."""
    strategy = sharding.strategy
    optimizer = part.optimizer
    updated = [variables[place] for place in part.places]
    stand_ins = sharding.stand_ins(optimizer, updated)

    def fill(gradients: list[tf.Tensor]) -> None:
        for variable, stand_in, gradient in zip(updated, stand_ins, gradients, strict=True):
            # Not before the whole gradient is freed, so that the two are not in memory together.
            with tf.control_dependencies([gradient]):
                own = own_share(tf.convert_to_tensor(variable.value))
                tf.raw_ops.AssignVariableOp(resource=stand_in.value.handle, value=own)

    def update(own: list[tf.Tensor]) -> None:
        pairs = list(zip(own, stand_ins, strict=True))
        # Not `apply`, as in `ddl.step.applying`.
        compiler.of_update(lambda: _none(optimizer.apply_gradients(pairs)), stand_ins, [optimizer])

    def whole() -> list[tf.Tensor]:
        own = []
        for stand_in in stand_ins:
            handle, dtype = stand_in.value.handle, stand_in.value.dtype
            own.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
            own[-1] = tf.ensure_shape(own[-1], stand_in.value.shape)
            with tf.control_dependencies([own[-1]]):
                free(handle, dtype)
        return gathered(own, [variable.value.shape for variable in updated])

    def constrain() -> None:
        for variable in updated:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    if compiler.is_on:
        sharding.allocate(stand_ins)
    own = [shares[place] for place in part.places]
    strategy.run(fill, args=(own,))
    with refusing_reductions(strategy), by_kernels([optimizer]):
        strategy.run(update, args=(own,))
    for variable, value in zip(updated, strategy.run(whole), strict=True):
        strategy.extended.update(variable.value, _assign, args=(value,), group=False)
    strategy.run(constrain)


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value, read_value=False)


def _none(_: Any) -> None:
    """Drops a result, which a compiled piece would have to return."""
