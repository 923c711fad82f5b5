"""Adam that leaves the rows of a table that have no gradient as they are."""

from collections.abc import Callable

import keras
import tensorflow as tf

from ddl.optimizers.fused import constructor_of
from ddl.optimizers.fused_adam import AdamKernel
from ddl.optimizers.rows.subtracting import subtract_rows


@keras.saving.register_keras_serializable("ddl")
class LazyAdam(AdamKernel, keras.optimizers.Adam):
    """Adam whose updates move only rows with a gradient. It computes something else than Adam.

    Adam moves every row in every update: the moments of a row without gradient decay, and the row
    follows its first moment. `LazyAdam` leaves a row and its moments as they are if the gradient of
    the global batch is zero in all entries of the row. For the other rows of the gradient g, at
    update t of the whole optimizer:

        m ← β₁·m + (1 - β₁)·g        v ← β₂·v + (1 - β₂)·g²
        w ← w - η·√(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

    A row is an index of a variable's first axis; of a vector, an entry. The rule is that of every
    variable, and does not ask whether a gradient is sparse or dense, since that may depend on the
    number of microbatches and replicas. So rows that were looked up only by padding, or by examples
    of weight 0, stay. Any update of all rows is that of `FusedAdam`. The bias correction counts all
    updates, also for a row that is seen for the first time. So do LazyAdam of TensorFlow Addons and
    SparseAdam of PyTorch, which move each row that a sparse gradient names.

    Sparse gradients take time only for their rows. Dense ones take more time than `FusedAdam`.

    With `weight_decay`, every update decays all rows.
    """

    __init__ = constructor_of(keras.optimizers.Adam, "lazy_adam")

    def fused_step(
        self, gradient: tf.Tensor, handle: tf.Tensor, index: int, scalars: dict[str, tf.Tensor]
    ) -> None:
        """Updates rows of a dense gradient; see `Fused.fused_step`. There is no kernel for it."""

        def read(slot: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ReadVariableOp(resource=slot, dtype=gradient.dtype)

        def write(slot: tf.Tensor, value: tf.Tensor) -> None:
            tf.raw_ops.AssignVariableOp(resource=slot, value=value)

        step = self._moved(gradient, index, scalars, read, write)
        tf.raw_ops.AssignSubVariableOp(resource=handle, value=step)

    def rows_step(
        self,
        gradient: tf.IndexedSlices,
        variable: tf.Variable,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Updates rows of a sparse gradient; see `Fused.rows_step`."""
        dtype, rows = gradient.dtype, gradient.indices

        def read(slot: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ResourceGather(resource=slot, indices=rows, dtype=dtype)

        def write(slot: tf.Tensor, value: tf.Tensor) -> None:
            tf.raw_ops.ResourceScatterUpdate(resource=slot, indices=rows, updates=value)

        step = self._moved(gradient.values, index, scalars, read, write)
        subtract_rows(variable, rows, step)

    def _moved(
        self,
        gradient: tf.Tensor,
        index: int,
        scalars: dict[str, tf.Tensor],
        read: Callable[[tf.Tensor], tf.Tensor],
        write: Callable[[tf.Tensor, tf.Tensor], None],
    ) -> tf.Tensor:
        """Moves the slots, and returns what to subtract from the variable; 0 for rows that stay.

        Args:
          gradient: Rows of the gradient, [rows, …].
          index: Index of the variable.
          scalars: Result of `scalars`, in the gradient's dtype.
          read: Returns these rows of a slot.
          write: Assigns these rows of a slot.
        """
        own = gradient.dtype
        dtype = own if own.size >= 4 else tf.float32  # half precision rounds β₂ to 1
        # Also true for a NaN.
        entries = tf.not_equal(gradient, tf.zeros([], own))
        moves = tf.reduce_any(entries, axis=list(range(1, gradient.shape.rank)), keepdims=True)
        gradient = tf.cast(gradient, dtype)
        if dtype != own:
            scalars = self.scalars(tf.cast(scalars["lr"], dtype))

        def moved(slot: keras.Variable, towards: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
            before = read(slot.value.handle)
            value = towards(tf.cast(before, dtype))
            write(slot.value.handle, tf.where(moves, tf.cast(value, own), before))
            return value

        def mean(of: tf.Tensor, beta: float) -> Callable[[tf.Tensor], tf.Tensor]:
            return lambda value: value + (of - value) * tf.constant(1 - beta, dtype)

        first = moved(self._momentums[index], mean(gradient, self.beta_1))
        second = moved(self._velocities[index], mean(tf.square(gradient), self.beta_2))
        if self.amsgrad:
            current = second
            second = moved(self._velocity_hats[index], lambda value: tf.maximum(value, current))
        powers = scalars["beta1_power"], scalars["beta2_power"]
        rate = scalars["lr"] * tf.sqrt(1 - powers[1]) / (1 - powers[0])
        step = first * rate / (tf.sqrt(second) + tf.constant(self.epsilon, dtype))
        return tf.where(moves, tf.cast(step, own), tf.zeros([], own))

    def unsupported_reason(self, dtype: tf.DType) -> str | None:
        """Returns None: `fused_step` consists of operations for every dtype."""
        return None

    def supports_sparse_updates(self) -> bool:
        """Returns True: a zero gradient changes neither the row nor its moments."""
        return True
