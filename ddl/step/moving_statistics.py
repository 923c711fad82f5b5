"""Variables that a model's forward pass writes, such as the moments of BatchNormalization.

The values may be replica-local (in layers that are not synchronized). A skipped update must leave
them unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.step.overflow import KeptValues

_MOST_BYTES = 1 << 16
"""Size of the largest value that is fetched from a GPU to be compared."""


class Statistics:
    """The variables that layers write in their forward pass.

    Attributes:
      variables: The strategy's distributed variables.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer], strategy: tf.distribute.Strategy):
        """Collects the layers' non-trainable variables that were made in the strategy's scope.

        Frozen weights are excluded, and so are variables made outside the scope, such as the
        moments of an adapted Normalization layer, which replicas only read.
        """
        self._strategy = strategy
        made = [v.value for layer in layers for v in layer._non_trainable_variables]
        self.variables = [v for v in made if strategy.extended.variable_created_in_scope(v)]

    @property
    def floating(self) -> list[tf.Variable]:
        """The floating-point variables, which can be averaged."""
        return [variable for variable in self.variables if variable.dtype.is_floating]

    def kept(self) -> KeptValues:
        """Reads the present values on every replica. Cross-replica context, in a graph."""
        return KeptValues(self.variables, self._strategy)


@contextmanager
def restoring(variables: Iterable[tf.Variable], *, only_changed: bool = False) -> Iterator[None]:
    """Restores variables bit for bit after the `with` block, also when the block raises.

    Args:
      variables: The variables.
      only_changed: Whether to compare each variable and to assign only changed ones. Reading a
        variable of several replicas takes far less time than assigning it.
    """
    own = [(variable, _read_in_place(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in own:
            if not (only_changed and _is_unchanged(variable, value)):
                variable.assign(value)


def _is_unchanged(variable: tf.Variable, value: tf.Tensor) -> bool:
    """Returns whether a variable has the bits of an eager tensor; False for large GPU tensors."""
    if not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
        return False
    size = value.shape.num_elements() * value.dtype.size
    if size > _MOST_BYTES and "CPU" not in value.device:  # an assignment takes less time
        return False
    tensors = (variable.read_value(), value)
    now, before = (np.ravel(tensor.numpy()).view(np.uint8) for tensor in tensors)
    return np.array_equal(now, before)


def _read_in_place(variable: tf.Variable) -> tf.Tensor:
    """Reads a variable on its own device; an eager read goes through the first GPU."""
    with tf.device(variable.device):
        return variable.read_value()


def gather_copies(
    all_copies: Sequence[Sequence[tf.Variable]], workers: Workers
) -> list[list[np.ndarray]]:
    """Gathers the values of all replicas of all workers on the host.

    Eager, cross-replica context, on all workers.

    Args:
      all_copies: For each variable, the copy of each replica of this worker.
      workers: The workers; each has as many replicas.

    Returns:
      For each variable, the value of each replica of all workers, in the order of replicas; no
      values if there is only one replica.
    """
    if all(workers.number * len(copies) == 1 for copies in all_copies):
        return [[] for _ in all_copies]
    own = _on_host(all_copies)
    if workers.number == 1 or not own:
        return own
    # One message for all values. float64 represents the values of the narrower floats exactly.
    flat = [np.reshape(value, -1).astype(np.float64) for values in own for value in values]
    rows = workers.gather(np.concatenate(flat))
    ends = np.cumsum([len(part) for part in flat])[:-1]
    parts = iter(np.split(rows, ends, axis=1))
    everywhere = []
    for values in own:
        stacked = np.stack([next(parts) for _ in values], axis=1)  # [workers, replicas, n]
        everywhere.append([*stacked.reshape(-1, *values[0].shape).astype(values[0].dtype)])
    return everywhere


def _on_host(all_copies: Sequence[Sequence[tf.Variable]]) -> list[list[np.ndarray]]:
    """Returns the value of each copy; one transfer per device and dtype."""
    groups: dict[tuple[str, tf.DType], list[tf.Variable]] = {}
    for copy in (copy for copies in all_copies for copy in copies):
        groups.setdefault((copy.device, copy.dtype), []).append(copy)
    values: dict[int, np.ndarray] = {}
    for (device, _), group in groups.items():
        with tf.device(device):
            flat = tf.concat([tf.reshape(copy.read_value(), [-1]) for copy in group], 0)
        ends = np.cumsum([copy.shape.num_elements() for copy in group])[:-1]
        for copy, part in zip(group, np.split(flat.numpy(), ends), strict=True):
            values[id(copy)] = part.reshape(copy.shape)
    return [[values[id(copy)] for copy in copies] for copies in all_copies]


@contextmanager
def synchronized(all_copies: Sequence[Sequence[tf.Variable]], workers: Workers) -> Iterator[None]:
    """Sets each variable to its mean over all replicas within the `with` block.

    Equal copies keep their value bit for bit and are not written. After the block, all copies are
    restored. Eager, cross-replica context, on all workers.

    Args:
      all_copies: For each variable, the copy of each replica of this worker.
      workers: The workers; each has as many replicas.
    """
    everywhere = gather_copies(all_copies, workers)
    means = [
        (copies, values)
        for copies, values in zip(all_copies, everywhere, strict=True)
        if differ(values)
    ]
    with restoring(copy for copies, _ in means for copy in copies):
        for copies, values in means:
            with tf.device("CPU:0"):
                start, *others = (tf.constant(value, copies[0].dtype) for value in values)
                # `_distance` of equal infinities is 0, not NaN.
                distances = [_distance(start, other) for other in others]
                mean = start + tf.add_n(distances) / (1 + len(others))
            for copy in copies:
                copy.assign(mean)
        yield


def differ(values: Sequence[np.ndarray]) -> bool:
    """Returns whether any value differs from the first, all of one shape."""
    return any(np.any(value != values[0]) for value in values)


def allow_replica_writes(
    layers: Iterable[keras.layers.Layer], strategy: tf.distribute.Strategy
) -> None:
    """Lets layers write their variables in a forward pass under CentralStorageStrategy.

    This strategy keeps one copy of each variable. TensorFlow rejects a write from several replicas
    without an aggregation, and Keras sets none. This function sets the mean for floats and the
    first replica's value for integers. Other strategies are unchanged.
    """
    if traits_of(strategy).shares_variables:
        for layer in layers:
            for variable in layer.variables:
                floating = variable.value.dtype.is_floating
                how = tf.VariableAggregation
                variable.value._aggregation = how.MEAN if floating else how.ONLY_FIRST_REPLICA


def _distance(start: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.equal(start, other), tf.zeros_like(start), other - start)
