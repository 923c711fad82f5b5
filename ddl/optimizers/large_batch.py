"""Optimizers for large batches: SGD with momentum correction, LARS and LAMB."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_no_text
from ddl.optimizers.variables import dense, matching


@keras.saving.register_keras_serializable("ddl")
class MomentumSGD(keras.optimizers.SGD):
    """SGD with momentum correction.

    Keras keeps the learning rate η inside the velocity: v ← m·v - η·g, w ← w + v. When η changes,
    the velocity still contains gradients scaled by the old rate. Goyal et al. 2017, "Accurate,
    Large Minibatch SGD", section 3, correct this by v ← m·(η_t / η_(t-1))·v + η_t·g. An equivalent
    form keeps the rate out of the velocity. It stores no earlier rate and never divides by a rate
    of zero:

        v ← m·v + g        w ← w - η·v        (Nesterov: w ← w - η·(g + m·v))

    It equals Keras's SGD while the rate is constant, and PyTorch's at any rate. The velocity is in
    units of the gradient, so a checkpoint of Keras's SGD cannot be resumed with it.

    With momentum, a sparse gradient is converted to a dense one, since momentum moves every row in
    every update.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = None,
        **kwargs: Any,
    ):
        """Initializes the optimizer; see `keras.optimizers.SGD`.

        Args:
          learning_rate: A float, a schedule, or a function that gives the rate.
          momentum: m above, in [0, 1].
          nesterov: Whether to use Nesterov momentum.
          weight_decay: Decoupled weight decay: w ← w - η·weight_decay·w, before the update.
          **kwargs: Further arguments of `keras.optimizers.SGD`, such as name. The Trainer rejects
            those that duplicate its own, such as clipnorm.
        """
        super().__init__(learning_rate, momentum, nesterov, weight_decay, **kwargs)

    def update_step(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any
    ) -> None:
        """Updates one variable. Runs in the strategy's update context.

        Args:
          gradient: Reduced gradient, of the variable's shape.
          variable: The variable to update, or a replica-local copy of it.
          learning_rate: Scalar.
        """
        if not self.momentum:  # rows without gradient stay as they are
            super().update_step(tf.cast(gradient, variable.dtype), variable, learning_rate)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=dense(gradient, variable),
            # tf.cast would round a Python number to float32 first.
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )


@keras.saving.register_keras_serializable("ddl")
class LARS(keras.optimizers.SGD):
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
          **kwargs: Further arguments of Keras's optimizer, such as name.

        Raises:
          ConfigError: If weight_decay, epsilon or trust_coefficient is out of range, or `exclude`
            is a text. `build` raises it if a pattern matches nothing.
        """
        super().__init__(learning_rate, momentum, nesterov, **kwargs)
        _check("LARS", exclude, weight_decay=weight_decay, epsilon=epsilon)
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
            self._excluded = matching(variables, self._exclude, "LARS.exclude")
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
        gradient = dense(gradient, variable)
        index = self._get_variable_index(variable)
        if index not in self._excluded:
            weights = tf.convert_to_tensor(variable)
            weight_norm, gradient_norm = _norm(weights), _norm(gradient)
            divisor = gradient_norm + self._decay * weight_norm + self.epsilon
            rate = _or_one(
                self.trust_coefficient * weight_norm / divisor, weight_norm, gradient_norm
            )
            gradient = tf.cast(rate, gradient.dtype) * (gradient + self._decay * weights)
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(  # as Keras's operations, in one pass
            var=variable.handle,
            accum=self.momentums[index].value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=gradient,
            momentum=tf.constant(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        own: dict[str, Any] = {"trust_coefficient": self.trust_coefficient, "epsilon": self.epsilon}
        own |= {"weight_decay": self._decay, "exclude": self._exclude}
        return super().get_config() | own


@keras.saving.register_keras_serializable("ddl")
class LAMB(keras.optimizers.Lamb):
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
          **kwargs: Further arguments of Keras's optimizer, such as name.

        Raises:
          ConfigError: If weight_decay or epsilon is out of range, or `exclude` is a text. `build`
            raises it if a pattern matches nothing.
        """
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **kwargs)
        _check("LAMB", exclude, weight_decay=weight_decay, epsilon=epsilon)
        # Keras would apply `self.weight_decay` in addition, before the update.
        self._decay = weight_decay
        self._exclude = None if exclude is None else tuple(exclude)

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates the moments and resolves the excluded variables.

        Raises:
          ConfigError: If a pattern of `exclude` is invalid or matches no variable.
        """
        if not self.built:
            self._excluded = matching(variables, self._exclude, "LAMB.exclude")
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
        gradient = dense(gradient, variable)
        index = self._get_variable_index(variable)
        first, second = self._momentums[index].value, self._velocities[index].value
        mean = first.assign_add((1 - self.beta_1) * (gradient - first))
        square = second.assign_add((1 - self.beta_2) * (tf.square(gradient) - second))
        updates = tf.cast(self.iterations + 1, dtype)
        mean = mean / (1 - tf.constant(self.beta_1, dtype) ** updates)
        square = square / (1 - tf.constant(self.beta_2, dtype) ** updates)
        update = mean / (tf.sqrt(square) + self.epsilon)
        if index not in self._excluded:
            weights = tf.convert_to_tensor(variable)
            update += self._decay * weights
            weight_norm, update_norm = _norm(weights), _norm(update)
            ratio = _or_one(weight_norm / update_norm, weight_norm, update_norm)
            update *= tf.cast(ratio, dtype)
        variable.assign_sub(tf.cast(learning_rate, dtype) * update)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return super().get_config() | {"weight_decay": self._decay, "exclude": self._exclude}


def _check(optimizer: str, exclude: Any, **numbers: float) -> None:
    check_no_text(f"{optimizer}.exclude", exclude)
    for name, number in numbers.items():
        if not number >= 0:
            raise ConfigError(f"{optimizer}.{name} must be at least 0, got {number}.")


def _norm(values: tf.Tensor) -> tf.Tensor:
    """Returns the Euclidean norm [], in at least float32."""
    return tf.norm(tf.cast(values, tf.float32) if values.dtype.size < 4 else values)


def _or_one(ratio: tf.Tensor, *norms: tf.Tensor) -> tf.Tensor:
    """Returns the ratio, or 1 where one of the norms is zero."""
    return tf.where(tf.reduce_all(tf.stack(norms) > 0), ratio, tf.ones_like(ratio))
