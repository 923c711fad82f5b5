"""Discovery of the layers and variables that a task holds."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.tasks.task import Task


def models_of(task: Any) -> dict[str, keras.Model]:
    """Returns the task's `model` by that name, or else the Keras models among its attributes."""
    if hasattr(task, "model"):
        return {"model": task.model}
    return {k: item for k, item in attributes_of(task).items() if isinstance(item, keras.Model)}


def layers_of(task: Task) -> list[keras.layers.Layer]:
    """Returns the layers of the task's model and all other layers the task holds, each once.

    The search covers the task's attributes, also in lists, tuples and dicts, and nested tasks.
    """
    held = [item for item in _held(task) if isinstance(item, keras.layers.Layer)]
    items = *models_of(task).values(), *held
    return each_once(layer for item in items for layer in item._flatten_layers())


def each_once(items: Iterable[Any]) -> list[Any]:
    """Returns objects in the order in which they first occur."""
    return list({id(item): item for item in items}.values())


def attributes_of(holder: object) -> dict[str, Any]:
    """Returns the instance attributes of an object by name, including slots."""
    slots = (getattr(cls, "__slots__", ()) for cls in type(holder).__mro__)
    names = [*getattr(holder, "__dict__", ()), *itertools.chain(*slots)]
    return {name: getattr(holder, name, None) for name in names}


def variables_of(holders: Iterable[Any]) -> list[tf.Variable]:
    """Returns the variables among the attributes of objects, each once.

    The search covers variables, random generators, layers, metrics and modules, also in lists,
    tuples, sets and dicts. Variables held only by a closure are not found.

    Args:
      holders: Objects such as tasks, layers and models.

    Returns:
      The variables; a mirrored variable is returned as its replica-local copies.
    """
    items = _items([attributes_of(holder) for holder in holders])
    variables = (variable for item in items for variable in _variables(item))
    return each_once(copy for variable in variables for copy in copies_of(variable))


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _items(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _variables(item: Any) -> Iterable[tf.Variable]:
    if isinstance(item, tf.Variable):
        return [item]
    if isinstance(item, keras.Variable):
        return [item.value]
    if isinstance(item, keras.random.SeedGenerator | tf.random.Generator):
        return _variables(item.state)
    if isinstance(item, keras.layers.Layer | keras.metrics.Metric | tf.Module):
        return [v for variable in item.variables for v in _variables(variable)]
    return []


def own_variables_of(task: Any, layers: Sequence[keras.layers.Layer]) -> list[tf.Variable]:
    """Returns the variables that Keras does not track, such as queues and counters.

    A task holds them in its attributes, or a layer holds a `tf.Variable`.

    Args:
      task: The task.
      layers: The task's layers (`layers_of`).

    Returns:
      Each variable once; a distributed variable is not split into its copies.
    """
    of_layers = {id(v.value) for layer in layers for v in layer.variables}
    within = _items([attributes_of(layer) for layer in layers])
    items = *own_items_of(task), *(item for item in within if isinstance(item, tf.Variable))
    return each_once(v for x in items for v in _variables(x) if id(v) not in of_layers)


def own_items_of(task: Any) -> list[Any]:
    """Returns what a task's attributes lead to, but for layers and optimizers.

    The search covers lists, tuples, sets and dicts, and nested tasks.
    """
    kinds = keras.layers.Layer | keras.optimizers.Optimizer
    return [item for item in _held(task) if not isinstance(item, kinds)]


def _held(task: Any, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yields what a task and its nested tasks hold, also in containers."""
    for item in _items(attributes_of(task)):
        if isinstance(item, keras.layers.Layer) or not hasattr(item, "per_example"):
            yield item
        elif id(item) not in seen | {id(task)}:  # a nested task
            yield from _held(item, seen | {id(task)})


def copies_of(variable: tf.Variable) -> Sequence[tf.Variable]:
    """Returns the replica-local copies on this worker, or the variable where it has no copies."""
    copies = getattr(variable, "values", None)
    return copies if isinstance(copies, tuple | list) else [variable]
