"""Base of the fused optimizers, which use TensorFlow's training kernels.

Keras 3 updates a variable by about ten elementwise operations, each of which reads and writes
memory of the variable's size. TensorFlow's training kernels do the same in one pass. A fused
optimizer subclasses Keras's and keeps its constructor, slots, config and checkpoints. Only
`update_step` differs; results differ only by rounding.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl import microbatch
from ddl.distribution.path import path_of
from ddl.optimizers.packing import Packed, zero_variable
from ddl.optimizers.rows.duplicates import merge_duplicates


def constructor_of(keras_class: type[keras.optimizers.Optimizer], name: str) -> Callable[..., None]:
    """Returns the constructor of a Keras optimizer with a fixed default name.

    Keras names an optimizer and its variables after the class. A drop-in subclass needs the names
    that the Keras class would have used.

    Args:
      keras_class: The Keras class that the fused class subclasses.
      name: Default name of an instance.
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
    """Mixin ahead of a Keras optimizer: `fused_step` replaces its `update_step`.

    A sparse gradient is converted to a dense one, with repeated rows summed: Keras also updates the
    slots of all rows, whether their gradient is zero or not. The exception is an optimizer that
    leaves rows without gradient unchanged; `rows_step` updates only the rows of the gradient.

    Attributes:
      merges_rows: Whether sparse gradients may hold a row more than once. `rows_merged` says for a
        while that they do not.
    """

    merges_rows = True

    def update_step(self, gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        """Updates one variable, or a replica-local copy, in the strategy's update context.

        Args:
          gradient: Dense or `tf.IndexedSlices`, of the variable's shape.
          variable: A variable that the optimizer was built with, or a replica-local copy of it.
          learning_rate: Scalar, or the results of `scalars` by dtype name.
        """
        dtype = variable.dtype
        scalars = learning_rate if isinstance(learning_rate, dict) else None
        if scalars is None:
            scalars = {dtype.name: self.scalars(tf.cast(learning_rate, dtype))}
        own = scalars[dtype.name]
        if isinstance(gradient, tf.IndexedSlices) and self.supports_sparse_updates():
            gradient = tf.cast(gradient, dtype)
            if self.merges_rows:
                gradient = merge_duplicates(gradient)
            self.rows_step(gradient, variable, self._get_variable_index(variable), own)
        elif lacks := self.unsupported_reason(dtype):
            _note_once(type(self).__name__, lacks)
            super().update_step(gradient, variable, own["lr"])
        else:
            gradient = dense_like(gradient, variable, dtype)
            self.fused_step(gradient, variable.handle, self._get_variable_index(variable), own)

    def _backend_update_step(
        self, gradients: Any, variables: list[Any], learning_rate: Any
    ) -> None:
        """Runs Keras's update of all variables with shared scalars computed once. Replica context.

        It overrides a private method of Keras; tests/optimizers/test_fused.py guards the name.
        """
        dtypes = dict.fromkeys(tf.as_dtype(variable.dtype) for variable in variables)
        # Computed only after a gradient: otherwise the forward pass would wait for the scalars.
        last = gradients[-1]
        given = last.values if isinstance(last, tf.IndexedSlices) else last
        with tf.control_dependencies([given]):
            by_dtype = {d.name: self.scalars(tf.cast(learning_rate, d)) for d in dtypes}
        self._decay_on_gpus(variables, learning_rate)
        super()._backend_update_step(gradients, variables, by_dtype)

    def scalars(self, learning_rate: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the scalar inputs of an update, by the kernel's argument names.

        Args:
          learning_rate: [], in the dtype of all results.
        """
        return {"lr": learning_rate}

    def fused_step(
        self,
        gradient: tf.Tensor,
        handle: tf.Tensor,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Applies the kernel to one variable.

        Args:
          gradient: Dense, of the variable's shape and dtype.
          handle: Resource handle of the variable.
          index: Index of the variable among those the optimizer was built with.
          scalars: Result of `scalars`, in the variable's dtype.
        """
        raise NotImplementedError

    def rows_step(
        self,
        gradient: tf.IndexedSlices,
        variable: tf.Variable,
        index: int,
        scalars: dict[str, tf.Tensor],
    ) -> None:
        """Updates the rows that a sparse gradient names, and reads no others.

        Called only if `supports_sparse_updates`.

        Args:
          gradient: Holds each row once, in the variable's dtype.
          variable: The variable, or a replica-local copy of it.
          index: Index of the variable among those the optimizer was built with.
          scalars: Result of `scalars`, in the variable's dtype.
        """
        raise NotImplementedError

    def unsupported_reason(self, dtype: tf.DType) -> str | None:
        """Returns why variables of a dtype need Keras's arithmetic; None if `fused_step` works."""
        return _no_kernel(dtype)

    def supports_sparse_updates(self) -> bool:
        """Returns whether an update leaves rows without gradient, and their slots, unchanged."""
        return False

    def _packs_decay(self) -> bool:
        """Returns whether `_decay_on_gpus` decays the weights."""
        own = type(self)._apply_weight_decay is Fused._apply_weight_decay
        return own and path_of().packs_tensors

    def _decay_on_gpus(self, variables: list[Any], learning_rate: Any) -> None:
        """Applies decoupled decay on GPUs, w ← w - w·(decay·learning rate), with few kernels.

        Elsewhere `_apply_weight_decay` does, and where a subclass has one of its own.
        """
        if self.weight_decay is None or not self._packs_decay():
            return
        decayed = [tensorflow_variable(v) for v in variables if self._use_weight_decay(v)]

        def decay(_: tf.Variable, learning_rate: Any) -> None:
            packed = Packed([tf.convert_to_tensor(variable) for variable in decayed])
            by_dtype = {}
            for dtype in dict.fromkeys(buffer.dtype for buffer in packed.buffers):
                rate = tf.constant(self.weight_decay, dtype) * tf.cast(learning_rate, dtype)
                by_dtype[dtype] = rate
            # Not w·(1 - rate), whose factor is rounded alike for all weights and updates.
            changed = [buffer - buffer * by_dtype[buffer.dtype] for buffer in packed.buffers]
            values = packed.unpacked(changed, True)
            for variable, value in zip(decayed, values, strict=True):
                variable.assign(value)

        def decay_all(strategy: tf.distribute.Strategy, learning_rate: Any) -> None:
            strategy.extended.update(decayed[0], decay, args=(learning_rate,), group=False)

        if decayed:
            tf.__internal__.distribute.interim.maybe_merge_call(
                decay_all, self._distribution_strategy, learning_rate
            )

    def _apply_weight_decay(self, variables: list[Any]) -> None:
        """Applies decoupled decay, w ← w - w·decay·learning rate, in one pass over each variable.

        It overrides a private method of Keras; tests/optimizers/test_fused.py guards the name.
        """
        if self.weight_decay is None or self._packs_decay():
            return

        def decay(variable: tf.Variable) -> None:
            rate = tf.cast(self.learning_rate, variable.dtype)
            # tf.cast would round a Python number to float32 first.
            decay = tf.constant(self.weight_decay, variable.dtype)
            if _no_kernel(variable.dtype):
                variable.assign_sub(variable * decay * rate)
            else:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=decay * rate, delta=variable.read_value()
                )

        def decay_all(strategy: tf.distribute.Strategy, variables: list[Any]) -> None:
            for variable in variables:
                if self._use_weight_decay(variable):
                    strategy.extended.update(tensorflow_variable(variable), decay, group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(
            decay_all, self._distribution_strategy, variables
        )


class Together(keras.optimizers.Optimizer):
    """Mixin ahead of a Keras optimizer: on GPUs, one update of all variables, with few kernels.

    The norms of all variables are taken together, and each variable's share of the update is one
    of TensorFlow's training kernels. The result is that of `update_step` but for rounding.
    """

    def _distributed_tf_update_step(
        self, distribution: Any, grads_and_vars: Sequence[tuple[Any, Any]], learning_rate: Any
    ) -> None:
        """Updates all variables.

        It overrides a private method of Keras; tests/step/test_on_gpus.py guards the name.
        """
        variables = [variable for _, variable in grads_and_vars]
        wide = all(variable.dtype.size >= 4 for variable in variables)
        in_buffers = path_of(distribution).packs_tensors and not microbatch.is_compiled()
        if not (wide and in_buffers):
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)
            return
        for dtype in dict.fromkeys(variable.dtype for variable in variables):
            own = [variable for variable in variables if variable.dtype == dtype]
            gradients = [gradient for gradient, v in grads_and_vars if v.dtype == dtype]

            def update(
                _: tf.Variable,
                gradients: Sequence[Any],
                rate: Any,
                own: Sequence[tf.Variable] = own,
                dtype: tf.DType = dtype,
            ) -> None:
                self.update_together(
                    [
                        dense_like(gradient, variable, dtype)
                        for gradient, variable in zip(gradients, own, strict=True)
                    ],
                    own,
                    tf.cast(rate, dtype),
                )

            distribution.extended.update(
                own[0], update, args=(gradients, learning_rate), group=False
            )

    def update_together(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates variables of one dtype. Runs in the strategy's update context.

        Args:
          gradients: Dense, one per variable.
          variables: The variables.
          learning_rate: [], in the variables' dtype.
        """
        raise NotImplementedError


def tensorflow_variable(variable: Any) -> tf.Variable:
    """Returns TensorFlow's variable of a Keras variable, and any other unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@contextmanager
def rows_merged(optimizers: Iterable[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Says that the sparse gradients of the `with` block hold each row once already.

    It must surround the whole trace, not the part of one replica: replicas take turns in a block.

    Args:
      optimizers: The optimizers; others than `Fused` are left as they are.
    """
    fused = [one for one in optimizers if isinstance(one, Fused) and one.merges_rows]
    for optimizer in fused:
        optimizer.merges_rows = False
    try:
        yield
    finally:
        for optimizer in fused:
            optimizer.merges_rows = True


@contextmanager
def temporary(like: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields the handle of a zero variable that lives for one update.

    A permanent variable would be a slot that Keras lacks, and would stay non-finite once it is.
    """
    handle = zero_variable(like)
    yield handle
    tf.raw_ops.DestroyResourceOp(resource=handle)


def dense(gradient: tf.Tensor | tf.IndexedSlices, dtype: tf.DType) -> tf.Tensor:
    """Returns a dense gradient of a dtype; repeated rows of a sparse one are summed."""
    return tf.cast(tf.convert_to_tensor(gradient), dtype)


def dense_like(gradient: tf.Tensor | tf.IndexedSlices, variable: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns `dense` with the static shape of a variable.

    The shape of a sparse gradient may be a tensor, as within tf.cond.
    """
    values = dense(gradient, dtype)
    known = values.shape.is_fully_defined()
    return values if known else tf.ensure_shape(values, variable.shape)


def _no_kernel(dtype: tf.DType) -> str | None:
    if dtype == tf.bfloat16:
        return "TensorFlow has no training kernels for bfloat16 on GPUs."
    return None


@functools.cache
def _note_once(optimizer: str, lacks: str) -> None:
    logging.info("%s uses Keras's update instead of a fused operation: %s", optimizer, lacks)
