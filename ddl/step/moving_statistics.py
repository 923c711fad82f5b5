"""Variables that a model's forward pass writes, such as the moments of BatchNormalization.

A skipped update must leave them unchanged, and all replicas hold the same values after an update.
"""

from collections.abc import Iterable

import keras
import tensorflow as tf

from ddl.distribution.traits import traits_of


def statistics_of(
    layers: Iterable[keras.layers.Layer], strategy: tf.distribute.Strategy
) -> list[tf.Variable]:
    """Returns the strategy's variables that layers write in their forward pass.

    These are the layers' non-trainable variables that were made in the strategy's scope. Frozen
    weights are excluded, and so are variables made outside the scope, such as the moments of an
    adapted Normalization layer, which replicas only read.
    """
    made = [v.value for layer in layers for v in layer._non_trainable_variables]
    return [v for v in made if strategy.extended.variable_created_in_scope(v)]


def average_over_replicas(
    variables: Iterable[tf.Variable], strategy: tf.distribute.Strategy
) -> None:
    """Sets floating-point variables to their means over the replicas, by one all-reduce.

    Other variables are left alone. Cross-replica context, in a graph.
    """
    floating = [variable for variable in variables if variable.dtype.is_floating]
    if strategy.num_replicas_in_sync == 1 or not floating:
        return
    values = strategy.run(lambda: [v.read_value() for v in floating])
    pairs = list(zip(values, floating, strict=True))
    means = strategy.extended.batch_reduce_to("MEAN", pairs)
    for variable, mean in zip(floating, means, strict=True):
        strategy.extended.update(variable, lambda v, x: v.assign(x), args=(mean,))


def allow_replica_writes(
    layers: Iterable[keras.layers.Layer], strategy: tf.distribute.Strategy
) -> None:
    """Lets layers write their variables in a forward pass under CentralStorageStrategy.

    This strategy keeps one copy of each variable. TensorFlow rejects a write from several replicas
    without an aggregation, and Keras sets none by default. This function then sets the mean for
    floats and the first replica's value for integers. Other strategies are unchanged.
    """
    if traits_of(strategy).shares_variables:
        for layer in layers:
            for variable in layer.variables:
                floating = variable.value.dtype.is_floating
                how = tf.VariableAggregation
                if variable.value.aggregation == how.NONE:
                    variable.value._aggregation = how.MEAN if floating else how.ONLY_FIRST_REPLICA
