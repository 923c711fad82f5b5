"""SGD with TensorFlow's fused kernels, and with the learning rate outside of the velocity."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ddl.optimizers.fused import Fused, constructor_of, dense
from ddl.optimizers.rows.subtracting import subtract_rows


@keras.saving.register_keras_serializable("ddl")
class FusedSGD(Fused, keras.optimizers.SGD):
    """`keras.optimizers.SGD` with TensorFlow's fused kernels for gradient descent and momentum.

    With momentum μ: v ← μ·v - η·g; w ← w + v. With Nesterov momentum (Sutskever et al. 2013, "On
    the importance of initialization and momentum in deep learning"): w ← w + μ·v - η·g.
    """

    __init__ = constructor_of(keras.optimizers.SGD, "sgd")

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """Applies the kernel to one variable; see `Fused.fused_step`."""
        if self.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=scalars["lr"], delta=gradient)
        else:
            momentum = tf.constant(self.momentum, gradient.dtype)
            kernel = tf.raw_ops.ResourceApplyKerasMomentum
            apply_momentum(self, kernel, gradient, handle, index, scalars["lr"], momentum)

    def rows_step(
        self,
        gradient: tf.IndexedSlices,
        variable: tf.Variable,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Updates rows without momentum; see `Fused.rows_step`."""
        subtract_rows(variable, gradient.indices, gradient.values * scalars["lr"])

    def supports_sparse_updates(self) -> bool:
        """Returns whether there is no momentum: only then rows without gradient stay."""
        return self.momentum == 0


@keras.saving.register_keras_serializable("ddl")
class MomentumSGD(keras.optimizers.SGD):
    """Keras's SGD, with momentum correction as an option.

    Keras keeps the learning rate η inside the velocity: v ← m·v - η·g, w ← w + v. When η changes,
    the velocity still contains gradients scaled by the old rate. Goyal et al. 2017, "Accurate,
    Large Minibatch SGD", section 3, correct this by v ← m·(η_t / η_(t-1))·v + η_t·g. An equivalent
    form keeps the rate out of the velocity. It stores no earlier rate and never divides by a rate
    of zero:

        v ← m·v + g        w ← w - η·v        (Nesterov: w ← w - η·(g + m·v))

    `momentum_correction` selects this form. Both forms are equal while the rate is constant. The
    velocity of the corrected form is in units of the gradient, so a checkpoint of one form cannot
    be resumed in the other. Either form is one TensorFlow kernel.

    With momentum, a sparse gradient is converted to a dense one, since momentum moves every row in
    every update.
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
        """Initializes the optimizer; see `keras.optimizers.SGD`.

        Args:
          learning_rate: A float, a schedule, or a function that gives the rate.
          momentum: m above, in [0, 1].
          nesterov: Whether to use Nesterov momentum.
          weight_decay: Decoupled weight decay: w ← w - η·weight_decay·w, before the update.
          momentum_correction: Whether to keep the rate out of the velocity.
          name: Name of the optimizer.
          **kwargs: Further arguments of `keras.optimizers.SGD`. The Trainer rejects those that
            duplicate its own, such as clipnorm.
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
        """Updates one variable. Runs in the strategy's update context.

        Args:
          gradient: Reduced gradient, of the variable's shape.
          variable: The variable to update, or a replica-local copy of it.
          learning_rate: Scalar.
        """
        if not self.momentum:  # rows without gradient stay as they are
            super().update_step(tf.cast(gradient, variable.dtype), variable, learning_rate)
            return
        gradient = dense(gradient, variable.dtype)
        kernels = tf.raw_ops
        kernel = (
            kernels.ResourceApplyMomentum
            if self.momentum_correction
            else kernels.ResourceApplyKerasMomentum
        )
        rate = tf.cast(learning_rate, variable.dtype)
        # tf.cast would round a Python number to float32 first.
        momentum = tf.constant(self.momentum, variable.dtype)
        index = self._get_variable_index(variable)
        apply_momentum(self, kernel, gradient, variable.handle, index, rate, momentum)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "momentum_correction": self.momentum_correction}


def apply_momentum(
    optimizer: keras.optimizers.SGD,
    kernel: Callable[..., object],
    gradient: tf.Tensor,
    handle: tf.Tensor,
    index: int,
    learning_rate: tf.Tensor,
    momentum: tf.Tensor,
) -> None:
    """Applies one of TensorFlow's momentum kernels to one variable.

    Args:
      optimizer: Holds the velocities, and whether the momentum is Nesterov's.
      kernel: `ResourceApplyKerasMomentum`, or `ResourceApplyMomentum` for a velocity without the
        learning rate.
      gradient: Dense, of the variable's shape and dtype.
      handle: Resource handle of the variable.
      index: Index of the variable among those the optimizer was built with.
      learning_rate: [], in the variable's dtype.
      momentum: [], in the variable's dtype.
    """
    kernel(
        var=handle,
        accum=optimizer.momentums[index].value.handle,
        lr=learning_rate,
        grad=gradient,
        momentum=momentum,
        use_nesterov=optimizer.nesterov,
    )
