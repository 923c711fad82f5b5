"""Keras's Adam, AdamW, SGD and Adagrad by TensorFlow's training kernels, with the same results.

Keras 3 updates a variable by about ten elementwise operations, each of which reads and writes
memory of the variable's size. TensorFlow's kernels do the same in one pass. Slots, config and
checkpoints stay Keras's own; results differ by rounding. Keras's own operations compute

- in half precision, where the kernels round 1 - β and ε too coarsely;
- AMSGrad, whose kernel XLA lacks;
- Adagrad with a dense gradient: TensorFlow's kernels add ε outside the root, Keras inside;
- every other class, and subclasses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ddl.optimizers.large_batch import MomentumSGD
from ddl.optimizers.variables import dense, subtract_rows

Scalars: TypeAlias = dict[str, tf.Tensor]

# Private to Keras but for update_step; tests/optimizers/test_fused.py guards the names.
_METHODS = ("_backend_update_step", "_apply_weight_decay", "update_step")
_WIDE = (tf.float32, tf.float64)


@contextmanager
def by_kernels(optimizers: Iterable[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Lets TensorFlow's kernels make the updates that are traced in the `with` block.

    It must surround the trace of all replicas, which take turns in a block. A sparse gradient must
    hold each row once, as after `merge_duplicates`.

    Args:
      optimizers: The optimizers; only plain Keras ones without methods of the user's own are
        changed, and only within the block.
    """
    plain = [one for one in optimizers if type(one) in {**_KERNELS, **_ROWS}]
    plain = [one for one in plain if vars(one).keys().isdisjoint(_METHODS)]
    for one in plain:
        methods = _Fused(one)
        # Past Keras's tracking of attributes.
        vars(one).update({name: getattr(methods, name) for name in _METHODS})
    try:
        yield
    finally:
        for one in plain:
            for name in _METHODS:
                del vars(one)[name]


def updates_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer reads and writes only the rows of a sparse gradient."""
    if type(optimizer) in (keras.optimizers.SGD, MomentumSGD):
        return not optimizer.momentum
    return type(optimizer) is keras.optimizers.Adagrad


class _Fused:
    """The methods of one optimizer while its updates are traced."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._keras = type(optimizer)
        self._is_amsgrad = getattr(optimizer, "amsgrad", False)

    def _backend_update_step(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
    ) -> None:
        """Keras's update of all variables, with scalars computed once. Replica context."""
        last = gradients[-1]
        # Computed only after a gradient: otherwise the forward pass would wait for the scalars.
        with tf.control_dependencies([last.values if isinstance(last, tf.IndexedSlices) else last]):
            dtypes = dict.fromkeys(tf.as_dtype(variable.dtype) for variable in variables)
            scalars = {dtype.name: self._scalars(learning_rate, dtype) for dtype in dtypes}
        self._keras._backend_update_step(self._optimizer, gradients, variables, scalars)

    def _scalars(self, learning_rate: Any, dtype: tf.DType) -> Scalars:
        """Returns the scalars of an update. Python numbers are rounded to float32, as by Keras."""
        optimizer = self._optimizer
        scalars = {"lr": tf.cast(learning_rate, dtype)}
        if optimizer.weight_decay is not None:
            scalars["decay"] = tf.cast(optimizer.weight_decay, dtype)
        if self._keras is keras.optimizers.SGD:
            scalars["momentum"] = tf.cast(optimizer.momentum, dtype)
        elif self._keras in _KERNELS:
            step = tf.cast(optimizer.iterations + 1, dtype)
            scalars["beta1_power"] = tf.pow(tf.cast(optimizer.beta_1, dtype), step)
            scalars["beta2_power"] = tf.pow(tf.cast(optimizer.beta_2, dtype), step)
        return scalars

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Does nothing: `update_step` decays each variable just before its update."""

    def update_step(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, by_dtype: Any
    ) -> None:
        """Updates one variable, or a replica-local copy, in the strategy's update context."""
        optimizer, scalars = self._optimizer, by_dtype[variable.dtype.name]
        if "decay" in scalars and optimizer._use_weight_decay(variable):
            decay, rate = scalars["decay"], scalars["lr"]
            wide = variable.dtype in _WIDE  # else the product of the two could underflow
            variable.assign_sub(variable * (decay * rate) if wide else variable * decay * rate)
        if isinstance(gradient, tf.IndexedSlices) and updates_rows(optimizer):
            _ROWS[self._keras](optimizer, tf.cast(gradient, variable.dtype), variable, scalars)
        elif self._keras in _KERNELS and variable.dtype in _WIDE and not self._is_amsgrad:
            _KERNELS[self._keras](optimizer, dense(gradient, variable), variable, scalars)
        else:
            self._keras.update_step(optimizer, gradient, variable, scalars["lr"])


def _adam(optimizer: Any, gradient: tf.Tensor, variable: tf.Variable, scalars: Scalars) -> None:
    """Applies Adam's kernel, which adds ε outside the root, as Keras does."""
    index, dtype = optimizer._get_variable_index(variable), variable.dtype
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=optimizer._momentums[index].value.handle,
        v=optimizer._velocities[index].value.handle,
        **{name: scalars[name] for name in ("lr", "beta1_power", "beta2_power")},
        beta1=tf.constant(optimizer.beta_1, dtype),
        beta2=tf.constant(optimizer.beta_2, dtype),
        epsilon=tf.constant(optimizer.epsilon, dtype),
        grad=gradient,
    )


def _sgd(optimizer: Any, gradient: tf.Tensor, variable: tf.Variable, scalars: Scalars) -> None:
    """Applies the kernel of gradient descent, or of momentum with the rate in the velocity."""
    var, rate = variable.handle, scalars["lr"]
    if not optimizer.momentum:
        tf.raw_ops.ResourceApplyGradientDescent(var=var, alpha=rate, delta=gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=var,
        accum=optimizer.momentums[optimizer._get_variable_index(variable)].value.handle,
        lr=rate,
        grad=gradient,
        momentum=scalars["momentum"],
        use_nesterov=optimizer.nesterov,
    )


def _sgd_rows(_: Any, rows: tf.IndexedSlices, variable: tf.Variable, scalars: Scalars) -> None:
    subtract_rows(variable, rows.indices, rows.values * scalars["lr"])


def _adagrad_rows(
    optimizer: Any, rows: tf.IndexedSlices, variable: tf.Variable, scalars: Scalars
) -> None:
    """Updates single rows; Keras takes the roots of all accumulators."""
    dtype, values, indices = variable.dtype, rows.values, rows.indices
    accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)].value.handle
    squares = tf.raw_ops.ResourceGather(resource=accumulator, indices=indices, dtype=dtype)
    squares += tf.square(values)
    tf.raw_ops.ResourceScatterUpdate(resource=accumulator, indices=indices, updates=squares)
    root = tf.sqrt(squares + tf.constant(optimizer.epsilon, dtype))
    subtract_rows(variable, indices, values * scalars["lr"] / root)


_KERNELS: dict[type, Callable[..., None]] = {
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.SGD: _sgd,
}
_ROWS: dict[type, Callable[..., None]] = {
    keras.optimizers.Adagrad: _adagrad_rows,
    keras.optimizers.SGD: _sgd_rows,
}
