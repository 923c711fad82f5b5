"""What can be told of a model before it is trained."""

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


def has_synchronized_layers(model: keras.Model) -> bool:
    """Whether any layer communicates between the replicas in its forward pass."""
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())


def check_layers(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Looks for layers that a strategy cannot run, or that make it matter.

    Logs which layers make a run depend on the number of replicas, if there are several.

    Raises:
      ConfigError: If the strategy is CentralStorageStrategy and a layer updates variables in its
        forward pass: Keras gives them no aggregation, without which it refuses.
    """
    layers = list(model._flatten_layers())
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    random = [layer for layer in layers if getattr(layer, "seed_generator", None)]
    central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    if central and (norms or random):
        raise ConfigError(
            f"central_storage cannot run the layers {_names(norms + random)} yet, which update "
            "variables of their own in the forward pass. Use mirrored."
        )
    if strategy.num_replicas_in_sync == 1:
        return
    if random:
        logging.warning(
            "The layers %s draw their own random numbers: all replicas draw the same, so what "
            "is trained depends on the number of replicas.",
            _names(random),
        )
    unsynchronized = [layer for layer in norms if not layer.synchronized]
    if unsynchronized:
        logging.warning(
            "The layers %s take their statistics from each replica's examples alone, and keep "
            "those of the first. Build them with synchronized=True.",
            _names(unsynchronized),
        )


def _names(layers: list[keras.layers.Layer]) -> str:
    return ", ".join(layer.name for layer in layers)
