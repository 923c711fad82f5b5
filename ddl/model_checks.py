"""What can be told of a model before it is trained."""

import itertools
from collections.abc import Sequence

import keras
import tensorflow as tf
from absl import logging

from ddl.errors import ConfigError
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


def warn_of_what_depends_on_replicas(
    layers: Sequence[keras.layers.Layer], strategy: tf.distribute.Strategy
) -> None:
    """Logs which layers make a run depend on the number of replicas, if there are several."""
    if strategy.num_replicas_in_sync == 1:
        return
    by_replica = [layer for layer in layers if _draws_by_replica(layer)]
    if by_replica:
        logging.warning(
            "The layers %s draw by replica, so what is trained depends on the number of replicas. "
            "Those of ddl.layers draw the same on any number.",
            _names(by_replica),
        )
    unsynchronized = [
        layer
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    if unsynchronized:
        logging.warning(
            "The layers %s take their statistics from each replica's examples alone; before an "
            "evaluation or a checkpoint they are averaged. Build them with synchronized=True.",
            _names(unsynchronized),
        )


def layers_of(task: Task) -> list[keras.layers.Layer]:
    """The layers of the task's model, and others that the task holds, each once.

    Those that it holds are its attributes, stand in lists, tuples or dicts that are, or belong to
    a task in it.
    """
    found: dict[int, keras.layers.Layer] = {}
    seen: set[int] = set()

    def look(holder: object) -> None:
        if id(holder) in seen:
            return
        seen.add(id(holder))
        slots = (getattr(cls, "__slots__", ()) for cls in type(holder).__mro__)
        names = [*getattr(holder, "__dict__", ()), *itertools.chain(*slots)]
        for item in keras.tree.flatten([getattr(holder, name, None) for name in names]):
            if isinstance(item, keras.layers.Layer):
                found.update({id(layer): layer for layer in item._flatten_layers()})
            elif hasattr(item, "per_example"):
                look(item)

    found.update({id(layer): layer for layer in task.model._flatten_layers()})
    look(task)
    return list(found.values())


def depends_on_microbatches(layers: Sequence[keras.layers.Layer]) -> bool:
    """Whether another number of microbatches trains something else.

    It does where a layer takes statistics of a microbatch, or draws by replica. What a layer of the
    user's own writes in its forward pass is not looked at.
    """
    return any(
        isinstance(layer, keras.layers.BatchNormalization) or _draws_by_replica(layer)
        for layer in layers
    )


def _draws_by_replica(layer: keras.layers.Layer) -> bool:
    return bool(layer._seed_generators) and not getattr(layer, "draws_by_position", False)


def _names(layers: list[keras.layers.Layer]) -> str:
    return ", ".join(layer.name for layer in layers)
