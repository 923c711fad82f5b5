"""Adam and AdamW with TensorFlow's fused kernels."""

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.optimizers.fused import Fused, constructor_of


class AdamKernel(Fused):
    """Adam's kernel, for all its classes.

    The kernel adds ε outside the root, as Keras does. It computes 1 - β in the variable's dtype.
    For β₂ = 0.999 that is accurate to 5e-5 in float32, and far off in half precision.
    """

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """Applies Adam's kernel to one variable; see `Fused.fused_step`."""
        dtype = gradient.dtype
        slots = {"m": self._momentums[index], "v": self._velocities[index]}
        kernel = tf.raw_ops.ResourceApplyAdam
        if self.amsgrad:
            slots["vhat"] = self._velocity_hats[index]
            kernel = tf.raw_ops.ResourceApplyAdamWithAmsgrad
            if microbatch.is_compiled():  # XLA lacks it
                kernel = _adam_with_amsgrad
        kernel(
            var=handle,
            **{name: slot.value.handle for name, slot in slots.items()},
            **scalars,
            beta1=tf.constant(self.beta_1, dtype),
            beta2=tf.constant(self.beta_2, dtype),
            epsilon=tf.constant(self.epsilon, dtype),
            grad=gradient,
        )

    def scalars(self, learning_rate: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the learning rate and the powers of both betas at this update, each []."""
        dtype = learning_rate.dtype
        step = tf.cast(self.iterations + 1, dtype)
        # tf.cast would round a Python number to float32 first, as Keras does.
        powers = {
            "beta1_power": tf.pow(tf.constant(self.beta_1, dtype), step),
            "beta2_power": tf.pow(tf.constant(self.beta_2, dtype), step),
        }
        return super().scalars(learning_rate) | powers

    def unsupported_reason(self, dtype: tf.DType) -> str | None:
        """Returns why half precision needs Keras's arithmetic; None for float32 and float64."""
        if dtype not in (tf.float32, tf.float64):
            return f"Adam's kernel computes 1 - beta_2 in {dtype.name}, which is too inaccurate."
        return None


def _adam_with_amsgrad(
    var: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    vhat: tf.Tensor,
    beta1_power: tf.Tensor,
    beta2_power: tf.Tensor,
    lr: tf.Tensor,
    beta1: tf.Tensor,
    beta2: tf.Tensor,
    epsilon: tf.Tensor,
    grad: tf.Tensor,
) -> None:
    """Computes what the kernel of this name does, in operations; variables are handles."""
    first, second, largest = (
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=grad.dtype) for handle in (m, v, vhat)
    )
    first += (grad - first) * (1 - beta1)
    second += (tf.square(grad) - second) * (1 - beta2)
    largest = tf.maximum(largest, second)
    for handle, value in ((m, first), (v, second), (vhat, largest)):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    rate = lr * tf.sqrt(1 - beta2_power) / (1 - beta1_power)
    step = first * rate / (tf.sqrt(largest) + epsilon)
    tf.raw_ops.AssignSubVariableOp(resource=var, value=step)


@keras.saving.register_keras_serializable("ddl")
class FusedAdam(AdamKernel, keras.optimizers.Adam):
    """`keras.optimizers.Adam` with TensorFlow's fused kernel: Kingma and Ba 2015, "Adam"."""

    __init__ = constructor_of(keras.optimizers.Adam, "adam")


@keras.saving.register_keras_serializable("ddl")
class FusedAdamW(AdamKernel, keras.optimizers.AdamW):
    """`keras.optimizers.AdamW` with TensorFlow's fused kernel.

    Loshchilov and Hutter 2019, "Decoupled weight decay regularization".
    """

    __init__ = constructor_of(keras.optimizers.AdamW, "adam_w")
