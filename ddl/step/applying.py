"""Applies a gradient on all replicas alike: penalties → clip by the global norm → optimizers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.step import gradients as gradient_path
from ddl.step.compiled import Compiler
from ddl.step.gradients import Gradient, Variables


class Part(NamedTuple):
    """An optimizer, and its part of the trained variables.

    Attributes:
      optimizer: The optimizer.
      variables: The variables that it updates, each once.
      times: Number of its updates in a step; None if that depends on a tensor.
      frozen_until: First step at which it updates its variables.
    """

    optimizer: keras.optimizers.Optimizer
    variables: Variables
    times: int | None
    frozen_until: int

    def places(self, variables: Variables) -> list[int]:
        """Returns which of some variables it updates."""
        own = set(map(id, self.variables))
        return [place for place, variable in enumerate(variables) if id(variable) in own]

    def unless_frozen(self, step: tf.Tensor, change: Callable[[], Any]) -> None:
        """Calls a function that changes variables, unless frozen. Cross-replica context.

        Args:
          step: Number of updates made before this one, int64 [].
          change: The function.
        """
        if not self.frozen_until:
            change()
            return

        def changed() -> tf.Tensor:
            change()
            return tf.constant(True)

        tf.cond(step >= self.frozen_until, changed, lambda: tf.constant(False))


@dataclasses.dataclass(frozen=True)
class Applying:
    """Applies one gradient by an optimizer of the step, or by its parameter groups.

    Parameter groups share the gradient: penalties and clipping see all of it, and each optimizer
    then updates the variables of its group.

    Attributes:
      strategy: The strategy.
      compiler: Compiles what a replica computes, or not.
      parts: The optimizers with their variables.
      variables: The variables of the gradient.
      clip: Largest global norm; None: no limit.
      step: Number of updates made before this one, int64 [].
    """

    strategy: tf.distribute.Strategy
    compiler: Compiler
    parts: Sequence[Part]
    variables: Variables
    clip: float | None
    step: tf.Tensor

    def __call__(self, values: Sequence[Any], factor: tf.Tensor | None) -> tf.Tensor:
        """Applies the gradient. Cross-replica context, in a graph.

        Args:
          values: One value per variable, equal on all replicas; sparse ones hold each row once.
          factor: A factor that is missing in them, [], or None.

        Returns:
          The global norm before clipping, float64 []; 0 without a limit of the norm. Frozen parts
          do not count in it.
        """
        optimizers = [part.optimizer for part in self.parts]

        def run(function: Callable[..., Any], *args: Any) -> Any:
            def on_replica(*own: Any) -> Any:
                piece = functools.partial(function, *own)
                return self.compiler.of_update(piece, self.variables, optimizers)

            return self.strategy.run(on_replica, args=args)

        with refusing_reductions(self.strategy), by_kernels(optimizers):
            if not self._some_frozen:
                norms = run(self._clip_and_apply, values, factor)
            else:
                limited, norms = run(self._clip, values, factor)
                for part in self.parts:
                    apply = functools.partial(self._apply, part)
                    part.unless_frozen(self.step, functools.partial(run, apply, limited))
        return self.strategy.experimental_local_results(norms)[0]

    @property
    def _some_frozen(self) -> bool:
        return any(part.frozen_until for part in self.parts)

    def _clip_and_apply(self, own: list[Gradient], factor: tf.Tensor | None) -> tf.Tensor:
        own, norm = self._clip(own, factor)
        for part in self.parts:
            self._apply(part, own)
        return norm

    def _clip(
        self, own: list[Gradient], factor: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the gradient with penalties, clipped, and its norm. Replica context."""
        if factor is not None:
            own = gradient_path.multiply(own, factor)
        own = gradient_path.add_regularization(own, self.variables)
        norm = tf.zeros([], tf.float64)
        if self.clip is not None:
            squared = self._squared_norm(own) if self._some_frozen else None
            own, norm = gradient_path.clip_by_global_norm(own, self.clip, squared)
        return own, tf.cast(norm, tf.float64)

    def _squared_norm(self, own: list[Gradient]) -> tf.Tensor:
        """Returns the squared global norm of the parts that are not frozen. Replica context."""
        squares = []
        for part in self.parts:
            places = part.places(self.variables)
            square = gradient_path.squared_norm([own[place] for place in places])
            is_active = tf.cast(self.step >= part.frozen_until, square.dtype)
            square = tf.math.multiply_no_nan(square, is_active)
            squares.append(tf.cast(square, gradient_path.widest(own)))
        return tf.add_n(squares)

    def _apply(self, part: Part, own: list[Gradient]) -> None:
        """Lets an optimizer update its variables. Replica context."""
        pairs = [(own[place], self.variables[place]) for place in part.places(self.variables)]
        # Not `apply`: a user's may override either, and `apply_gradients` calls `apply`.
        part.optimizer.apply_gradients(pairs)
