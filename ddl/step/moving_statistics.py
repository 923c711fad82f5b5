"""Variables that a model's forward pass writes, such as the moments of BatchNormalization.

A skipped update must leave them unchanged, and all replicas hold the same values after an update.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.step.all_reduce import AllReduce
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

    def average(self, all_reduce: AllReduce) -> None:
        """Sets each floating-point variable to its mean over the replicas, by one all-reduce.

        Cross-replica context, in a graph.
        """
        if self._strategy.num_replicas_in_sync == 1 or not self.floating:
            return
        flat = self._strategy.run(
            lambda: tf.concat(
                [tf.cast(tf.reshape(v, [-1]), tf.float64) for v in self.floating], axis=0
            )
        )
        means = all_reduce.of_sums(flat) / self._strategy.num_replicas_in_sync
        sizes = [variable.shape.num_elements() for variable in self.floating]
        for variable, mean in zip(self.floating, tf.split(means, sizes), strict=True):
            value = tf.cast(tf.reshape(mean, variable.shape), variable.dtype)
            self._strategy.extended.update(variable, lambda v, x: v.assign(x), args=(value,))


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
