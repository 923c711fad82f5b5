"""RMSprop and Adagrad with TensorFlow's fused kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from ddl.optimizers.fused import Fused, constructor_of, temporary


@keras.saving.register_keras_serializable("ddl")
class FusedRMSprop(Fused, keras.optimizers.RMSprop):
    """`keras.optimizers.RMSprop` with TensorFlow's fused kernels, centered or not.

    Hinton 2012, "Neural networks for machine learning", lecture 6. As in Keras, ε is added inside
    the root.
    """

    __init__ = constructor_of(keras.optimizers.RMSprop, "rm_sprop")

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """Applies RMSprop's kernel to one variable; see `Fused.fused_step`."""
        dtype = gradient.dtype
        kernel, centered = tf.raw_ops.ResourceApplyRMSProp, {}
        if self.centered:
            kernel = tf.raw_ops.ResourceApplyCenteredRMSProp
            centered = {"mg": self._average_gradients[index].value.handle}
        with _velocity(self, gradient, index) as velocity:
            kernel(
                var=handle,
                **centered,
                ms=self._velocities[index].value.handle,
                mom=velocity,
                **scalars,
                rho=tf.constant(self.rho, dtype),
                momentum=tf.constant(self.momentum, dtype),
                epsilon=tf.constant(self.epsilon, dtype),
                grad=gradient,
            )

    def unsupported_reason(self, dtype: tf.DType) -> str | None:
        """Returns why half precision needs Keras's arithmetic; None for float32 and float64."""
        return _lacks_half_precision("RMSprop", dtype)


@keras.saving.register_keras_serializable("ddl")
class FusedAdagrad(Fused, keras.optimizers.Adagrad):
    """`keras.optimizers.Adagrad` with TensorFlow's fused kernel of RMSprop.

    Duchi et al. 2011, "Adaptive subgradient methods". TensorFlow's kernels for Adagrad add ε
    outside the root or not at all; Keras adds it inside, as RMSprop's kernel does. With ρ = 1
    RMSprop's kernel leaves its mean of squares unchanged, so it holds Adagrad's sum of squares,
    which is accumulated beforehand.
    """

    __init__ = constructor_of(keras.optimizers.Adagrad, "adagrad")

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """Applies RMSprop's kernel to one variable; see `Fused.fused_step`."""
        dtype = gradient.dtype
        accumulator = self._accumulators[index].value.handle
        tf.raw_ops.AssignAddVariableOp(resource=accumulator, value=tf.square(gradient))
        with temporary(gradient) as velocity:
            tf.raw_ops.ResourceApplyRMSProp(
                var=handle,
                ms=accumulator,
                mom=velocity,
                **scalars,
                rho=tf.constant(1, dtype),
                momentum=tf.constant(0, dtype),
                epsilon=tf.constant(self.epsilon, dtype),
                grad=gradient,
            )

    def unsupported_reason(self, dtype: tf.DType) -> str | None:
        """Returns why half precision needs Keras's arithmetic; None for float32 and float64."""
        return _lacks_half_precision("Adagrad", dtype)

    def supports_sparse_updates(self) -> bool:
        """Returns True: a zero gradient changes neither the row nor its accumulator."""
        return True


def _lacks_half_precision(name: str, dtype: tf.DType) -> str | None:
    if dtype not in (tf.float32, tf.float64):
        return f"{name}'s kernel and Keras round differently in {dtype.name}."
    return None


@contextmanager
def _velocity(optimizer: FusedRMSprop, gradient: tf.Tensor, index: int) -> Iterator[tf.Tensor]:
    """Yields the handle of the velocity: Keras's slot, or without momentum a temporary variable."""
    if optimizer.momentum > 0:
        yield optimizer._momentums[index].value.handle
    else:
        with temporary(gradient) as handle:
            yield handle
