"""Gradient descent with momentum, with the learning rate inside the velocity or outside of it."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("ddl")
class MomentumSGD(keras.optimizers.SGD):
    """Keras's SGD, with momentum correction as an option.

    Keras keeps the learning rate η inside the velocity: v ← m·v - η·g, w ← w + v. When η changes,
    what was collected at the old rate goes on at the old rate. Goyal et al. 2017, "Accurate, Large
    Minibatch SGD", section 3, correct that by v ← m·(η_t / η_(t-1))·v + η_t·g. The same, without a
    rate to remember and without a division by a rate of zero, is a velocity without the rate:

        v ← m·v + g        w ← w - η·v        (Nesterov: w ← w - η·(g + m·v))

    That is what is computed here with `momentum_correction`. As long as the rate does not change
    both forms are equal. The velocity is in units of the gradient then, so that a checkpoint of one
    form does not go on in the other. Either form is one kernel of TensorFlow.

    A sparse gradient is made dense, since momentum moves every row in every update.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        momentum_correction: bool = True,
        name: str | None = None,
        **kwargs: Any,
    ):
        """As `keras.optimizers.SGD`.

        Args:
          learning_rate: A float, a schedule, or a function that gives the rate.
          momentum: m above, from 0 to 1.
          nesterov: Whether the gradient is taken ahead of the velocity.
          weight_decay: Decoupled: w ← w - η·weight_decay·w, before the update.
          momentum_correction: Whether the velocity is kept without the rate.
          name: Of the optimizer.
          **kwargs: The rest of Keras's arguments, which ddl's Trainer refuses where it does the
            same itself.
        """
        super().__init__(
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            name=name,
            **kwargs,
        )
        self.momentum_correction = momentum_correction

    def update_step(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any
    ) -> None:
        """Moves one variable by its reduced gradient. In the strategy's update context."""
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        kernels = tf.raw_ops
        apply = (
            kernels.ResourceApplyMomentum
            if self.momentum_correction
            else kernels.ResourceApplyKerasMomentum
        )
        apply(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=gradient,
            # Not tf.cast, which rounds a Python number to float32 first.
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict[str, Any]:
        """What the constructor takes."""
        return {**super().get_config(), "momentum_correction": self.momentum_correction}
