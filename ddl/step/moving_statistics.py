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
def restoring(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Restores variables bit for bit after the `with` block, also when the block raises."""
    own = [(variable, _read(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in own:
            variable.assign(value)


def gather_copies(
    all_copies: Sequence[Sequence[tf.Variable]], workers: Workers
) -> list[list[tf.Tensor]]:
    """Gathers the values of all replicas of all workers.

    Eager, cross-replica context, on all workers.

    Args:
      all_copies: For each variable, the copy of each replica of this worker.
      workers: The workers; each has as many replicas.

    Returns:
      For each variable, the value of each replica of all workers, in the order of replicas.
    """
    own = [[_read(copy) for copy in copies] for copies in all_copies]
    if workers.number == 1 or not own:
        return own
    # One message for all values. float64 represents the values of the narrower floats exactly.
    flat = [np.reshape(value.numpy(), -1).astype(np.float64) for values in own for value in values]
    rows = workers.gather(np.concatenate(flat))
    ends = np.cumsum([len(part) for part in flat])[:-1]
    parts = iter(np.split(rows, ends, axis=1))
    everywhere = []
    for values in own:
        stacked = np.stack([next(parts) for _ in values], axis=1)  # [workers, replicas, n]
        stacked = stacked.reshape(-1, *values[0].shape)
        everywhere.append([tf.constant(value, values[0].dtype) for value in stacked])
    return everywhere


@contextmanager
def synchronized(all_copies: Sequence[Sequence[tf.Variable]], workers: Workers) -> Iterator[None]:
    """Sets each variable to its mean over all replicas within the `with` block.

    Equal copies keep their value bit for bit. After the block, all copies are restored. Eager,
    cross-replica context, on all workers.

    Args:
      all_copies: For each variable, the copy of each replica of this worker.
      workers: The workers; each has as many replicas.
    """
    with restoring(copy for copies in all_copies for copy in copies):
        everywhere = gather_copies(all_copies, workers)
        for copies, (start, *others) in zip(all_copies, everywhere, strict=True):
            if not others:
                continue
            # `_distance` of equal infinities is 0, not NaN.
            distances = [_distance(start, other) for other in others]
            mean = start + tf.add_n(distances) / (1 + len(others))
            for copy in copies:
                copy.assign(mean)
        yield


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


def _read(variable: tf.Variable) -> tf.Tensor:
    """Returns the value on the variable's own device; `read_value` alone copies it to the first."""
    with tf.device(variable.device):
        return variable.read_value()
