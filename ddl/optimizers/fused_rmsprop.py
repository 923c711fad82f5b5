"""RMSprop and Adagrad in one pass over each variable."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from ddl.optimizers.fused import Fused, constructor_of


@keras.saving.register_keras_serializable("ddl")
class FusedRMSprop(Fused, keras.optimizers.RMSprop):
    """`keras.optimizers.RMSprop` by TensorFlow's kernels, centered or not.

    Hinton 2012, "Neural networks for machine learning", lecture 6. As in Keras, ε is added before
    the root is taken.
    """

    __init__ = constructor_of(keras.optimizers.RMSprop, "rm_sprop")

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """See `Fused`."""
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

    def kernel_lacks(self, dtype: tf.DType) -> str | None:
        """See `Fused`."""
        return _lacks_half_precision("RMSprop", dtype)


@keras.saving.register_keras_serializable("ddl")
class FusedAdagrad(Fused, keras.optimizers.Adagrad):
    """`keras.optimizers.Adagrad` by a kernel of TensorFlow.

    Duchi et al. 2011, "Adaptive subgradient methods". TensorFlow's kernels for Adagrad add ε to
    the root or not at all, Keras adds it before the root is taken, as RMSprop's kernel does. With
    ρ = 1 that leaves its sum of squares alone, which is the rest of Adagrad.
    """

    __init__ = constructor_of(keras.optimizers.Adagrad, "adagrad")

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """See `Fused`."""
        dtype = gradient.dtype
        accumulator = self._accumulators[index].value.handle
        tf.raw_ops.AssignAddVariableOp(resource=accumulator, value=tf.square(gradient))
        with _temporary(gradient) as velocity:
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

    def kernel_lacks(self, dtype: tf.DType) -> str | None:
        """See `Fused`."""
        return _lacks_half_precision("Adagrad", dtype)

    def leaves_rows_without_gradient(self) -> bool:
        """See `Fused`."""
        return True


def _lacks_half_precision(name: str, dtype: tf.DType) -> str | None:
    if dtype not in (tf.float32, tf.float64):
        return f"{name}'s kernel rounds otherwise than Keras in {dtype.name}"
    return None


@contextmanager
def _velocity(optimizer: FusedRMSprop, gradient: tf.Tensor, index: int) -> Iterator[tf.Tensor]:
    """The handle of what the kernel keeps the velocity in, which Keras has with momentum alone."""
    if optimizer.momentum > 0:
        yield optimizer._momentums[index].value.handle
    else:
        with _temporary(gradient) as handle:
            yield handle


# ResourceHandle::ANONYMOUS_NAME of TensorFlow: each execution makes a variable of its own. A name
# drawn while tracing would be the same for all workers of parameter servers, which share a trace.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


@contextmanager
def _temporary(like: tf.Tensor) -> Iterator[tf.Tensor]:
    """The handle of a variable of zeros that is there for one update.

    One that stays would be a slot that Keras lacks, and once not finite never be so again.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=like.dtype, shape=like.shape, shared_name=_ANONYMOUS)
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros_like(like))
    yield handle
    tf.raw_ops.DestroyResourceOp(resource=handle)
