"""What can be told of a model before it is trained on several replicas."""

import keras
import tensorflow as tf
from absl import logging

from ddl.errors import ConfigError


def check_variables(model: keras.Model, strategy: tf.distribute.Strategy) -> list[keras.Variable]:
    """The model's trainable variables.

    Raises:
      ConfigError: If there are none, or the strategy cannot update them.
    """
    variables = list(model.trainable_variables)
    if not variables:
        raise ConfigError(f"the model {model.name!r} has no trainable variables")
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ConfigError(
                f"the model's variable {variable.path!r} was made outside the strategy's scope. "
                "Build the model under `with strategy.scope():`."
            )
    return variables


def computes_in_float16(model: keras.Model) -> bool:
    """Whether any layer does, so that gradients may underflow."""
    return any(layer.compute_dtype == "float16" for layer in model._flatten_layers())


def warn_of_replica_dependence(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Logs which layers make a run depend on the number of replicas, if there are several."""
    if strategy.num_replicas_in_sync == 1:
        return
    layers = model._flatten_layers()
    random = [layer.name for layer in layers if getattr(layer, "seed_generator", None)]
    if random:
        logging.warning(
            "The layers %s draw their own random numbers: all replicas draw the same, so what "
            "is trained depends on the number of replicas.",
            ", ".join(random),
        )
    unsynchronized = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    if unsynchronized:
        logging.warning(
            "The layers %s take their statistics from each replica's examples alone, and keep "
            "those of the first. Build them with synchronized=True.",
            ", ".join(unsynchronized),
        )
