"""LAMB: layer-wise rates of Adam."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import check_no_text
from ddl.optimizers.exclusions import excluded
from ddl.optimizers.fused import Together, dense, temporary
from ddl.optimizers.layerwise.norms import check_not_negative, norm, or_one, or_ones
from ddl.optimizers.packing import Packed, norms, unstacked


@keras.saving.register_keras_serializable("ddl")
class LAMB(Together, keras.optimizers.Lamb):
    """Layer-wise Adam: You et al. 2019, "Large Batch Optimization for Deep Learning".

    Algorithm 2 of the paper, with φ the identity, at the learning rate η:

        m ← β₁·m + (1 - β₁)·g        v ← β₂·v + (1 - β₂)·g²
        r ← m / (1 - β₁ᵗ) / (√(v / (1 - β₂ᵗ)) + ε) + λ·w        w ← w - η·‖w‖/‖r‖·r

    λ is the weight decay. Where ‖w‖ or ‖r‖ is zero, their ratio is taken as 1. Keras's Lamb is the
    same for λ = 0 without exclusions. Its `weight_decay` shrinks the weights before the update,
    outside the ratio, and biases get a ratio too. Here excluded variables follow Adam without
    decay.

    A sparse gradient is converted to a dense one, since moments and decay move every row.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        exclude: Sequence[str] | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        """Initializes the optimizer.

        Args:
          learning_rate: η above: a float, a schedule, or a function that gives the rate.
          beta_1: β₁ above.
          beta_2: β₂ above.
          epsilon: ε above, at least 0.
          weight_decay: λ above. Not Keras's decoupled weight decay.
          exclude: Regular expressions, searched in the variables' paths. None excludes biases and
            normalization parameters; () excludes nothing.
          name: Name of the optimizer.
          **kwargs: Further arguments of Keras's optimizer.

        Raises:
          ConfigError: If a number is out of range, or `exclude` is a text. `build` raises it if a
            pattern matches nothing.
        """
        super().__init__(
            learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, name=name, **kwargs
        )
        check_not_negative("LAMB", weight_decay=weight_decay, epsilon=epsilon)
        check_no_text("LAMB.exclude", exclude)
        # Keras would apply `self.weight_decay` in addition, before the update.
        self._decay = weight_decay
        self._exclude = None if exclude is None else tuple(exclude)

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates the moments and resolves the excluded variables.

        Raises:
          ConfigError: If a pattern of `exclude` is invalid or matches no variable.
        """
        if not self.built:
            self._excluded = excluded(variables, self._exclude, "LAMB.exclude")
        super().build(variables)

    def _direction(self, mean: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        """Returns r of the class's docstring, without decay, from the moments of this update."""
        dtype = mean.dtype
        updates = tf.cast(self.iterations + 1, dtype)
        mean = mean / (1 - tf.constant(self.beta_1, dtype) ** updates)
        square = square / (1 - tf.constant(self.beta_2, dtype) ** updates)
        return mean / (tf.sqrt(square) + self.epsilon)

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
        place = self._get_variable_index(variable)
        first, second = self._momentums[place].value, self._velocities[place].value
        mean = first.assign_add((1 - self.beta_1) * (gradient - first))
        square = second.assign_add((1 - self.beta_2) * (tf.square(gradient) - second))
        update = self._direction(tf.convert_to_tensor(mean), tf.convert_to_tensor(square))
        if place not in self._excluded:
            weights = tf.convert_to_tensor(variable)
            update += self._decay * weights
            weight_norm, update_norm = norm(weights), norm(update)
            ratio = or_one(weight_norm / update_norm, weight_norm, update_norm)
            update *= tf.cast(ratio, dtype)
        variable.assign_sub(tf.cast(learning_rate, dtype) * update)

    def update_together(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates all variables; see `Together.update_together`."""
        dtype = learning_rate.dtype
        updates = tf.cast(self.iterations + 1, dtype)
        powers = [tf.constant(beta, dtype) ** updates for beta in (self.beta_1, self.beta_2)]
        # The kernel adds ε to √v before it divides by √(1 - β₂ᵗ).
        epsilon = self.epsilon * tf.sqrt(1 - powers[1])

        def adam(handle: tf.Tensor, place: int, rate: tf.Tensor) -> None:
            index = self._get_variable_index(variables[place])
            tf.raw_ops.ResourceApplyAdam(
                var=handle,
                m=self._momentums[index].value.handle,
                v=self._velocities[index].value.handle,
                beta1_power=powers[0],
                beta2_power=powers[1],
                lr=rate,
                beta1=tf.constant(self.beta_1, dtype),
                beta2=tf.constant(self.beta_2, dtype),
                epsilon=epsilon,
                grad=gradients[place],
            )

        directions, places = [], []
        for place, variable in enumerate(variables):
            if self._get_variable_index(variable) in self._excluded:
                adam(variable.handle, place, learning_rate)
                continue
            with temporary(gradients[place]) as handle:
                adam(handle, place, tf.constant(-1, dtype))
                direction = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            directions.append(tf.ensure_shape(direction, variable.shape))
            places.append(place)
        if not places:
            return
        weights = [tf.convert_to_tensor(variables[place]) for place in places]
        if self._decay:
            packed = Packed(directions)
            pairs = zip(packed.buffers, packed.alike(weights), strict=True)
            directions = packed.unpacked([r + self._decay * w for r, w in pairs])
        weight_norms, update_norms = norms(weights), norms(directions)
        ratios = or_ones(weight_norms / update_norms, weight_norms, update_norms)
        rates = unstacked(learning_rate * ratios)
        for place, direction, rate in zip(places, directions, rates, strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variables[place].handle, alpha=rate, delta=direction
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "weight_decay": self._decay, "exclude": self._exclude}
