"""What can be told of a model before it is trained."""

from collections.abc import Sequence

import keras
import tensorflow as tf
from absl import logging

from ddl.errors import ConfigError
from ddl.normalization import take_over_moments
from ddl.random import seed_by_replica
from ddl.task import Task


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


def prepare_layers(layers: Sequence[keras.layers.Layer], strategy: tf.distribute.Strategy) -> None:
    """Makes Keras's layers compute and draw as a distributed step needs it.

    Their random generators give each replica a stream of its own (`ddl.random`), and their batch
    statistics leave padding out (`ddl.normalization`). Logs which layers make a run depend on
    the number of replicas, if there are several.
    """
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    random = [layer for layer in layers if layer._seed_generators]
    for layer in norms:
        take_over_moments(layer)
    seed_by_replica(generator for layer in random for generator in layer._seed_generators)
    if strategy.num_replicas_in_sync == 1:
        return
    by_replica = [layer for layer in random if not getattr(layer, "draws_by_position", False)]
    if by_replica:
        logging.warning(
            "The layers %s draw by replica, so what is trained depends on the number of replicas. "
            "Those of ddl.layers draw the same on any number.",
            _names(by_replica),
        )
    unsynchronized = [layer for layer in norms if not layer.synchronized]
    if unsynchronized:
        logging.warning(
            "The layers %s take their statistics from each replica's examples alone; before an "
            "evaluation or a checkpoint they are averaged. Build them with synchronized=True.",
            _names(unsynchronized),
        )


def layers_of(task: Task) -> list[keras.layers.Layer]:
    """The layers of the task's model, and others that the task holds, each once."""
    found = list(task.model._flatten_layers())
    for value in getattr(task, "__dict__", {}).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, keras.layers.Layer):
                found += item._flatten_layers()
    return list({id(layer): layer for layer in found}.values())


def _names(layers: list[keras.layers.Layer]) -> str:
    return ", ".join(layer.name for layer in layers)
