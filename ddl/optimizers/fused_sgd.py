"""SGD with TensorFlow's fused kernels."""

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
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=handle,
                accum=self.momentums[index].value.handle,
                **scalars,
                grad=gradient,
                momentum=tf.cast(self.momentum, gradient.dtype),
                use_nesterov=self.nesterov,
            )

    def leaves_rows_without_gradient(self) -> bool:
        """Returns whether there is no momentum: only then rows without gradient stay."""
        return self.momentum == 0
