"""LARS: layer-wise rates of SGD with momentum."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_no_text
from ddl.optimizers.exclusions import excluded
from ddl.optimizers.fused import Together, dense
from ddl.optimizers.fused_sgd import MomentumSGD
from ddl.optimizers.layerwise.norms import check_not_negative, norm, or_one, or_ones
from ddl.optimizers.packing import Packed, norms, unstacked


@keras.saving.register_keras_serializable("ddl")
class LARS(Together, MomentumSGD):
    """Layer-wise adaptive rate scaling: You et al. 2017, "Large Batch Training of CNNs".

    Algorithm 1 of the paper, for each variable with weights w and gradient g, at the rate γ:

        λ ← η·‖w‖ / (‖g‖ + β·‖w‖ + ε)        v ← m·v + γ·λ·(g + β·w)        w ← w - v

    η is the trust coefficient, λ the local rate and β the weight decay, which enters λ. Where ‖w‖
    or ‖g‖ is zero, λ is 1. Excluded variables have no local rate and no decay: they follow SGD with
    momentum at the rate γ. Therefore γ is the rate of the biases, while a layer moves by about γ·η
    of its norm per update: tune the two together.

    ‖g‖ is the norm of the reduced gradient, the same on every replica. A sparse gradient is
    converted to a dense one, since decay and momentum move every row.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        exclude: Sequence[str] | None = None,
        momentum_correction: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ):
        """Initializes the optimizer.

        Args:
          learning_rate: γ above: a float, a schedule, or a function that gives the rate.
          momentum: m above, in [0, 1].
          nesterov: Whether to use Nesterov momentum.
          weight_decay: β above. Not Keras's decoupled weight decay.
          trust_coefficient: η above, more than 0.
          epsilon: ε above, at least 0.
          exclude: Regular expressions, searched in the variables' paths. None excludes biases and
            normalization parameters; () excludes nothing.
          momentum_correction: See `MomentumSGD`. The paper does not use it.
          name: Name of the optimizer.
          **kwargs: Further arguments of Keras's optimizer.

        Raises:
          ConfigError: If a number is out of range, or `exclude` is a text. `build` raises it if a
            pattern matches nothing.
        """
        super().__init__(
            learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            momentum_correction=momentum_correction,
            name=name,
            **kwargs,
        )
        check_not_negative("LARS", weight_decay=weight_decay, epsilon=epsilon)
        check_no_text("LARS.exclude", exclude)
        if not trust_coefficient > 0:
            raise ConfigError(
                f"LARS.trust_coefficient must be greater than 0, got {trust_coefficient}."
            )
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        # Keras would apply `self.weight_decay` in addition, before the update.
        self._decay = weight_decay
        self._exclude = None if exclude is None else tuple(exclude)

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates the velocities and resolves the excluded variables.

        Raises:
          ConfigError: If a pattern of `exclude` is invalid or matches no variable.
        """
        if not self.built:
            self._excluded = excluded(variables, self._exclude, "LARS.exclude")
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
        gradient = dense(gradient, variable.dtype)
        place = self._get_variable_index(variable)
        if place not in self._excluded:
            weights = tf.convert_to_tensor(variable)
            weight_norm, gradient_norm = norm(weights), norm(gradient)
            rate = (
                self.trust_coefficient
                * weight_norm
                / (gradient_norm + self._decay * weight_norm + self.epsilon)
            )
            rate = tf.cast(or_one(rate, weight_norm, gradient_norm), gradient.dtype)
            gradient = rate * (gradient + self._decay * weights)
        super().update_step(gradient, variable, learning_rate)

    def update_together(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates all variables; see `Together.update_together`."""
        changed = list(gradients)
        places = [
            place
            for place, variable in enumerate(variables)
            if self._get_variable_index(variable) not in self._excluded
        ]
        if places:
            own = [gradients[place] for place in places]
            weights = [tf.convert_to_tensor(variables[place]) for place in places]
            weight_norms, gradient_norms = norms(weights), norms(own)
            divisors = gradient_norms + self._decay * weight_norms + self.epsilon
            rates = self.trust_coefficient * weight_norms / divisors
            rates = or_ones(rates, weight_norms, gradient_norms)
            if self._decay:
                packed = Packed(own)
                pairs = zip(packed.buffers, packed.alike(weights), strict=True)
                own = packed.unpacked([g + self._decay * w for g, w in pairs])
            for place, gradient, rate in zip(places, own, unstacked(rates), strict=True):
                changed[place] = rate * gradient
        for gradient, variable in zip(changed, variables, strict=True):
            super().update_step(gradient, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "weight_decay": self._decay,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "exclude": self._exclude,
        }
