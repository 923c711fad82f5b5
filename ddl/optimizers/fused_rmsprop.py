"""RMSprop and Adagrad with TensorFlow's fused kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.optimizers.fused import Fused, constructor_of, temporary
from ddl.optimizers.rows.subtracting import subtract_rows


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
        if microbatch.is_compiled() and not self.momentum:
            self._in_operations(gradient, handle, index, scalars["lr"])
            return
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

    def _in_operations(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, learning_rate: tf.Tensor
    ) -> None:
        """Computes what the kernel does without momentum: XLA has no temporary variables."""
        share = 1 - tf.constant(self.rho, gradient.dtype)
        squares = _moved(self._velocities[index].value.handle, tf.square(gradient), share)
        if self.centered:
            mean = _moved(self._average_gradients[index].value.handle, gradient, share)
            squares -= tf.square(mean)
        _descend(handle, gradient, squares, learning_rate, self.epsilon)

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
        if microbatch.is_compiled():  # XLA has no temporary variables
            squares = tf.raw_ops.ReadVariableOp(resource=accumulator, dtype=dtype)
            _descend(handle, gradient, squares, scalars["lr"], self.epsilon)
            return
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

    def rows_step(
        self,
        gradient: tf.IndexedSlices,
        variable: tf.Variable,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Updates single rows; see `Fused.rows_step`. Keras takes the roots of all accumulators."""
        dtype, values, rows = gradient.dtype, gradient.values, gradient.indices
        accumulator = self._accumulators[index].value.handle
        squares = tf.raw_ops.ResourceGather(resource=accumulator, indices=rows, dtype=dtype)
        squares += tf.square(values)
        tf.raw_ops.ResourceScatterUpdate(resource=accumulator, indices=rows, updates=squares)
        root = tf.sqrt(squares + tf.constant(self.epsilon, dtype))
        subtract_rows(variable, rows, values * scalars["lr"] / root)

    def unsupported_reason(self, dtype: tf.DType) -> str | None:
        """Returns why half precision needs Keras's arithmetic; None for float32 and float64."""
        return _lacks_half_precision("Adagrad", dtype)

    def supports_sparse_updates(self) -> bool:
        """Returns True: a zero gradient changes neither the row nor its accumulator."""
        return True


def _moved(handle: tf.Tensor, towards: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Moves a variable by a share of the distance to values; returns its new value."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=towards.dtype)
    value += (towards - value) * share
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return value


def _descend(
    handle: tf.Tensor,
    gradient: tf.Tensor,
    squares: tf.Tensor,
    learning_rate: tf.Tensor,
    epsilon: float,
) -> None:
    """Subtracts the rate times the gradient over the root of squares and ε from a variable."""
    root = tf.sqrt(squares + tf.constant(epsilon, gradient.dtype))
    step = gradient * learning_rate / root
    tf.raw_ops.AssignSubVariableOp(resource=handle, value=step)


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
