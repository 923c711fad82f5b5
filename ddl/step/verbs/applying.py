"""Applying gradients of the global batch: penalties → clipping → optimizers.

Parameter groups share one gradient: penalties and clipping see all of it, and each optimizer then
updates the variables of its group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.step import gradients as gradient_path
from ddl.step.compiled.compiler import Compiler
from ddl.step.compiled.deferred import Deferred
from ddl.step.gradients import Gradient
from ddl.step.sharding import InShares, Sharding
from ddl.step.sharding.applying import apply_to_shares
from ddl.step.verbs.parts import OptimizerPart, unless_frozen


def apply(
    strategy: tf.distribute.Strategy,
    gradients: list[Any] | Deferred | InShares,
    variables: Sequence[keras.Variable],
    parts: Sequence[OptimizerPart],
    clip: float | None,
    step: tf.Tensor,
    compiler: Compiler,
    sharding: Sharding | None = None,
) -> tf.Tensor:
    """Applies a gradient. Cross-replica context, in a graph.

    Args:
      strategy: The strategy.
      gradients: One reduced, unscaled value per variable, or values to multiply; with `sharding`
        also in shares.
      variables: The variables.
      parts: The optimizers and what each updates.
      clip: The largest global norm, or None.
      step: Number of updates made before this one, int64 [].
      compiler: Compiles the computation of each replica, or leaves it as it is.
      sharding: The shares of the optimizers' slots; None: each replica holds whole slots.

    Returns:
      The global norm before clipping, float64 []; 0 without a limit of the norm. Frozen parts do
      not count in it.
    """
    if sharding is not None:
        return apply_to_shares(sharding, gradients, variables, parts, clip, step, compiler)
    assert not isinstance(gradients, InShares)
    return _apply_whole(strategy, gradients, variables, parts, clip, step, compiler)


def _apply_whole(
    strategy: tf.distribute.Strategy,
    gradients: list[Any] | Deferred,
    variables: Sequence[keras.Variable],
    parts: Sequence[OptimizerPart],
    clip: float | None,
    step: tf.Tensor,
    compiler: Compiler,
) -> tf.Tensor:
    """Applies a gradient to whole slots; returns the norm that `apply` returns."""
    values = gradients.values if isinstance(gradients, Deferred) else gradients

    def clipped(own: list[Gradient]) -> tuple[list[Gradient], tf.Tensor]:
        if isinstance(gradients, Deferred):
            own = gradient_path.multiply(own, gradients.factor())
        own = gradient_path.add_regularization(own, variables)
        norm = tf.zeros([], tf.float64)
        if clip is not None:
            frozen = any(part.frozen_until for part in parts)
            squared = _squared_norm(own, parts, step) if frozen else None
            own, norm = gradient_path.clip_by_global_norm(own, clip, squared)
        return own, tf.cast(norm, tf.float64)

    def update(part: OptimizerPart, own: list[Gradient]) -> None:
        pairs = [(own[place], variables[place]) for place in part.places]
        # Not `apply`: a user's optimizer may override either, and `apply_gradients` calls `apply`.
        part.optimizer.apply_gradients(pairs)

    def clipped_and_applied(own: list[Gradient]) -> tf.Tensor:
        own, norm = clipped(own)
        for part in parts:
            update(part, own)
        return norm

    optimizers = [part.optimizer for part in parts]

    def run(function: Callable[[list[Gradient]], Any], own: Any) -> Any:
        return strategy.run(
            lambda own: compiler.of_update(lambda: function(own), variables, optimizers),
            args=(own,),
        )

    # `with_each_row_once` has merged the rows.
    with refusing_reductions(strategy), by_kernels(optimizers):
        if any(part.frozen_until for part in parts):
            limited, norms = run(clipped, values)
            for part in parts:
                unless_frozen(part, step, lambda p=part: run(lambda own: update(p, own), limited))
        else:
            norms = run(clipped_and_applied, values)
    return strategy.experimental_local_results(norms)[0]


def _squared_norm(
    gradients: Sequence[Gradient], parts: Sequence[OptimizerPart], step: tf.Tensor
) -> tf.Tensor:
    """Returns the squared global norm of the parts that are not frozen. Replica context."""
    squares = []
    for part in parts:
        square = gradient_path.squared_norm([gradients[place] for place in part.places])
        if part.frozen_until:
            square = tf.where(step >= part.frozen_until, square, tf.zeros_like(square))
        squares.append(square)
    widest = max((square.dtype for square in squares), key=lambda dtype: dtype.size)
    return tf.add_n([tf.cast(square, widest) for square in squares])
