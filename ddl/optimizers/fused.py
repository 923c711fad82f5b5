"""What the fused optimizers share: TensorFlow's training kernels in place of Keras's arithmetic.

Keras 3 updates a variable by ten or so elementwise operations, each of which reads and writes
memory of the variable's size. TensorFlow's training kernels do the same in one pass. A fused
optimizer is Keras's own class, with its constructor, slots, config and checkpoints; only
`update_step` differs, and its results only by rounding.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging


def constructor_of(keras_class: type[keras.optimizers.Optimizer], name: str) -> Callable[..., None]:
    """The constructor of a Keras optimizer, for a subclass that goes by its name.

    Keras calls an optimizer, and the variables it makes, after its class. A subclass that is to
    stand in its place needs the names that the Keras class would have given.

    Args:
      keras_class: The class, before the fused one in the order of resolution.
      name: What an instance is called when it is made without a name.
    """
    signature = inspect.signature(keras_class.__init__)

    @functools.wraps(keras_class.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        if given.arguments.get("name") is None:
            given.arguments["name"] = name
        keras_class.__init__(*given.args, **given.kwargs)

    return construct


class Fused(keras.optimizers.Optimizer):
    """Stands before an optimizer of Keras: `fused_step` replaces its `update_step`.

    A gradient of which only some rows are given is made whole first, because Keras moves the slots
    of all rows too, whether their gradient is zero or not. Rows given twice are added up.
    """

    def update_step(self, gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        """Updates a variable on one replica, within `extended.update`.

        Args:
          gradient: Dense or `tf.IndexedSlices`, of the variable's shape.
          variable: One that the optimizer was built with, or a replica's copy of it.
          learning_rate: A scalar; or what `scalars` gave by the name of each dtype, in place of it.
        """
        dtype = variable.dtype
        scalars = learning_rate if isinstance(learning_rate, dict) else None
        if scalars is None:
            scalars = {dtype.name: self.scalars(tf.cast(learning_rate, dtype))}
        own = scalars[dtype.name]
        if lacks := _no_kernel(dtype) or self.kernel_lacks(dtype):
            _note_once(type(self).__name__, lacks)
            super().update_step(gradient, variable, own["lr"])
        elif isinstance(gradient, tf.IndexedSlices) and self.leaves_rows_without_gradient():
            super().update_step(gradient, variable, own["lr"])
        else:
            gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
            self.fused_step(gradient, variable.handle, self._get_variable_index(variable), own)

    def _backend_update_step(
        self, gradients: Any, variables: list[Any], learning_rate: Any
    ) -> None:
        """Keras's, with what is the same for all variables computed once. Replica context.

        The name is Keras's; tests/optimizers/test_fused.py holds it.
        """
        dtypes = dict.fromkeys(tf.as_dtype(variable.dtype) for variable in variables)
        # Not before a gradient is there: the forward pass would wait for it.
        last = gradients[-1]
        given = last.values if isinstance(last, tf.IndexedSlices) else last
        with tf.control_dependencies([given]):
            by_dtype = {d.name: self.scalars(tf.cast(learning_rate, d)) for d in dtypes}
        super()._backend_update_step(gradients, variables, by_dtype)

    def scalars(self, learning_rate: tf.Tensor) -> dict[str, tf.Tensor]:
        """What an update takes beside gradients and slots, by the kernel's names for it.

        Args:
          learning_rate: [], of the dtype that all of it is to have.
        """
        return {"lr": learning_rate}

    def fused_step(
        self,
        gradient: tf.Tensor,
        handle: tf.Tensor,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Applies the kernel to the variable behind `handle`, number `index` of those built with.

        `gradient` and `scalars` are of the variable's dtype.
        """
        raise NotImplementedError

    def kernel_lacks(self, dtype: tf.DType) -> str | None:
        """Why variables of a dtype are updated by Keras's own arithmetic; None if they are not."""
        return None

    def leaves_rows_without_gradient(self) -> bool:
        """Whether a row whose gradient is zero stays as it is, its slots too."""
        return False

    def _apply_weight_decay(self, variables: list[Any]) -> None:
        """Keras's decoupled decay, w ← w - w·decay·learning rate, in one pass over each variable.

        The name is Keras's; tests/optimizers/test_fused.py holds it.
        """
        if self.weight_decay is None:
            return

        def decay(variable: tf.Variable) -> None:
            rate = tf.cast(self.learning_rate, variable.dtype)
            decay = tf.cast(self.weight_decay, variable.dtype)
            if _no_kernel(variable.dtype):
                variable.assign_sub(variable * decay * rate)
            else:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=decay * rate, delta=variable.read_value()
                )

        def decay_all(strategy: tf.distribute.Strategy, variables: list[Any]) -> None:
            for variable in variables:
                if self._use_weight_decay(variable):
                    value = variable.value if isinstance(variable, keras.Variable) else variable
                    strategy.extended.update(value, decay, group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(
            decay_all, self._distribution_strategy, variables
        )


def _no_kernel(dtype: tf.DType) -> str | None:
    if dtype == tf.bfloat16:
        return "TensorFlow has no training kernels for bfloat16 on GPUs"
    return None


@functools.cache
def _note_once(optimizer: str, lacks: str) -> None:
    logging.info("%s updates as Keras's own class does: %s", optimizer, lacks)
