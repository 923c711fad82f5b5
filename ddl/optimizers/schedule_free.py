"""AdamW without a learning rate schedule."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.fused import dense


class AdamWScheduleFree(keras.optimizers.ScheduleFreeAdamW):
    """Schedule-free AdamW: Defazio et al. 2024, "The road less scheduled".

    With the gradient at y, d its direction by Adam plus weight decay, and η the learning rate after
    the warm-up factor w_t = min(t / warmup_steps, 1),

        z ← z - η·d
        x ← (1 - c)·x + c·z,   c = w_t² / Σ w_i² of the updates so far
        y ← (1 - β₁)·z + β₁·x

    The model holds y and the slot `momentum` holds z; evaluations and exports use x. The class
    replaces Keras's, which reads z after it has changed it, and decays only y, so that its x is
    not the average of z.
    """

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the slots.

        Raises:
          ConfigError: If β₁ is out of range: with 0 the weights do not determine x.
        """
        if not 0 < self.beta_1 < 1:
            raise ConfigError(
                f"AdamWScheduleFree.beta_1 must be between 0 and 1, both excluded, got "
                f"{self.beta_1}."
            )
        super().build(variables)

    def update_step(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any
    ) -> None:
        """Updates one variable. Runs in the strategy's update context.

        Args:
          gradient: Reduced gradient, of the variable's shape.
          variable: The variable to update, or a replica-local copy of it.
          learning_rate: Scalar.
        """
        dtype = variable.dtype
        gradient = dense(gradient, dtype)
        index = self._get_variable_index(variable)
        z, velocity = self._momentums[index], self._velocities[index]
        beta_1, beta_2 = (tf.constant(beta, dtype) for beta in (self.beta_1, self.beta_2))
        step = tf.cast(self.iterations.value, tf.float64) + 1
        second = tf.convert_to_tensor(velocity.value)
        second += (1 - beta_2) * (tf.square(gradient) - second)
        unbiased = second / tf.cast(1 - tf.constant(self.beta_2, tf.float64) ** step, dtype)
        direction = gradient / (tf.sqrt(unbiased) + tf.constant(self.epsilon, dtype))
        y, before = tf.convert_to_tensor(variable), tf.convert_to_tensor(z.value)
        if self.weight_decay and self._use_weight_decay(variable):
            direction += tf.constant(self.weight_decay, dtype) * y
        warmup, weight = self._warmup(step)
        change = tf.cast(learning_rate, dtype) * tf.cast(warmup, dtype) * direction
        c = tf.cast(weight, dtype)
        # The definition above without x; y and z are those before the update.
        moved = (1 - c) * y + c * before - (1 - beta_1 * (1 - c)) * change
        self.assign(velocity, second)
        self.assign(z, before - change)
        self.assign(variable, moved)

    def _warmup(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the factor of the rate and c, both float64 [], of update `step`, from 1 on."""
        if self.warmup_steps < 1:
            return tf.ones([], tf.float64), 1 / step
        length = float(self.warmup_steps)
        factor = tf.minimum(step / length, 1.0)
        whole = (length + 1) * (2 * length + 1) / (6 * length)
        during = step * (step + 1) * (2 * step + 1) / (6 * length**2)
        total = tf.where(step <= length, during, whole + step - length)
        return factor, factor**2 / total

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing: the decay is a part of the direction."""
