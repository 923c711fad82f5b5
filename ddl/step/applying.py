"""Applying gradients of the global batch: penalties → clipping → optimizers.

Parameter groups share one gradient: penalties and clipping see all of it, and each optimizer then
updates the variables of its group.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.step import gradients as gradient_path
from ddl.step.compiled import Compiler
from ddl.step.gradients import Gradient
from ddl.step.sharding import Sharding, apply_to_shares
from ddl.step.verbs.gradients import Gradients


class OptimizerPart(NamedTuple):
    """The part of a gradient that an optimizer updates.

    Attributes:
      optimizer: The optimizer.
      places: Places of its variables in the gradient.
      frozen_until: First step at which it updates its variables.
    """

    optimizer: keras.optimizers.Optimizer
    places: Sequence[int]
    frozen_until: int = 0

    def unless_frozen(self, step: tf.Tensor, update: Callable[[], Any]) -> None:
        """Calls a function that updates variables, unless frozen. Cross-replica context.

        Args:
          step: Number of updates made before this one, int64 [].
          update: The function.
        """
        if not self.frozen_until:
            update()
            return

        def updated() -> tf.Tensor:
            update()
            return tf.constant(True)

        tf.cond(step >= self.frozen_until, updated, lambda: tf.constant(False))


def apply(
    strategy: tf.distribute.Strategy,
    gradients: Gradients,
    parts: Sequence[OptimizerPart],
    clip: float | None,
    step: tf.Tensor,
    compiler: Compiler,
    sharding: Sharding | None,
) -> tf.Tensor:
    """Applies a gradient. Cross-replica context, in a graph.

    Args:
      strategy: The strategy.
      gradients: The gradient.
      parts: The optimizers and what each updates.
      clip: The largest global norm, or None.
      step: Number of updates made before this one, int64 [].
      compiler: Compiles the computation of each replica, or leaves it as it is.
      sharding: The shares of the optimizers' slots; None: each replica holds whole slots.

    Returns:
      The global norm before clipping, float64 []; 0 without a limit of the norm. Frozen parts do
      not count in it.
    """
    variables = gradients.variables
    values, factor = gradients.to_apply
    if sharding is not None:
        return apply_to_shares(*(sharding, values, factor, variables, parts, clip, step, compiler))

    def clipped(own: list[Gradient], factor: tf.Tensor | None) -> tuple[Any, tf.Tensor]:
        if factor is not None:
            own = gradient_path.multiply(own, factor)
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

    def clipped_and_applied(own: list[Gradient], factor: tf.Tensor | None) -> tf.Tensor:
        own, norm = clipped(own, factor)
        for part in parts:
            update(part, own)
        return norm

    optimizers = [part.optimizer for part in parts]

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return strategy.run(
            lambda *own: compiler.of_update(lambda: function(*own), variables, optimizers),
            args=args,
        )

    # `with_each_row_once` has merged the rows.
    with refusing_reductions(strategy), by_kernels(optimizers):
        if any(part.frozen_until for part in parts):
            limited, norms = run(clipped, values, factor)
            for part in parts:
                part.unless_frozen(
                    step, functools.partial(run, functools.partial(update, part), limited)
                )
        else:
            norms = run(clipped_and_applied, values, factor)
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
