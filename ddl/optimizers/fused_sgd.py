"""SGD with TensorFlow's fused kernels."""

from collections.abc import Callable

import keras
import tensorflow as tf

from ddl.optimizers.fused import Fused, constructor_of


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

    def supports_sparse_updates(self) -> bool:
        """Returns whether there is no momentum: only then rows without gradient stay."""
        return self.momentum == 0


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
