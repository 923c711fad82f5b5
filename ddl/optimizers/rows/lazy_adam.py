"""Adam that updates only the rows of a table that the batch has looked up."""

import keras
import tensorflow as tf

from ddl.optimizers.fused import constructor_of
from ddl.optimizers.fused_adam import AdamKernel


@keras.saving.register_keras_serializable("ddl")
class LazyAdam(AdamKernel, keras.optimizers.Adam):
    """Adam whose sparse gradients move single rows. It computes something else than Adam.

    Adam moves every row in every update: the moments of a row without gradient decay, and the row
    follows its first moment. `LazyAdam` leaves such a row and its moments as they are. For the rows
    of a sparse gradient g, at update t of the whole optimizer:

        m ← β₁·m + (1 - β₁)·g        v ← β₂·v + (1 - β₂)·g²
        w ← w - η·√(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

    A dense gradient is updated as by `FusedAdam`; both are equal if each update names every row.
    The bias correction counts all updates, also for a row that is seen for the first time. So do
    LazyAdam of TensorFlow Addons and SparseAdam of PyTorch.

    With `weight_decay`, every update decays all rows.
    """

    __init__ = constructor_of(keras.optimizers.Adam, "lazy_adam")

    def rows_step(
        self,
        gradient: tf.IndexedSlices,
        variable: tf.Variable,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Updates single rows; see `Fused.rows_step`."""
        own, rows = gradient.dtype, gradient.indices
        dtype = own if own.size >= 4 else tf.float32  # half precision rounds β₂ to 1
        values = tf.cast(gradient.values, dtype)
        if dtype != own:
            scalars = self.scalars(tf.cast(scalars["lr"], dtype))

        def read(slot: keras.Variable) -> tf.Tensor:
            handle = slot.value.handle
            value = tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=own)
            return tf.cast(value, dtype)

        def write(slot: keras.Variable, value: tf.Tensor) -> None:
            tf.raw_ops.ResourceScatterUpdate(
                resource=slot.value.handle, indices=rows, updates=tf.cast(value, own)
            )

        def moved(slot: keras.Variable, towards: tf.Tensor, beta: float) -> tf.Tensor:
            value = read(slot)
            value += (towards - value) * tf.constant(1 - beta, dtype)
            write(slot, value)
            return value

        first = moved(self._momentums[index], values, self.beta_1)
        second = moved(self._velocities[index], tf.square(values), self.beta_2)
        if self.amsgrad:
            second = tf.maximum(read(self._velocity_hats[index]), second)
            write(self._velocity_hats[index], second)
        powers = scalars["beta1_power"], scalars["beta2_power"]
        rate = scalars["lr"] * tf.sqrt(1 - powers[1]) / (1 - powers[0])
        step = first * rate / (tf.sqrt(second) + tf.constant(self.epsilon, dtype))
        tf.raw_ops.ResourceScatterSub(
            resource=variable.handle, indices=rows, updates=tf.cast(step, own)
        )

    def supports_sparse_updates(self) -> bool:
        """Returns True: this is what LazyAdam is asked for."""
        return True
