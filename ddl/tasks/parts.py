"""Discovery of the layers and variables that a task holds."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.tasks.task import Task


def layers_of(task: Task) -> list[keras.layers.Layer]:
    """Returns the layers of the task's model and all other layers the task holds, each once.

    The search covers the task's attributes, also in lists, tuples and dicts, and nested tasks.
    """
    found: dict[int, keras.layers.Layer] = {}
    seen: set[int] = set()

    def look(holder: object) -> None:
        if id(holder) in seen:
            return
        seen.add(id(holder))
        for item in keras.tree.flatten(list(attributes_of(holder).values())):
            if isinstance(item, keras.layers.Layer):
                found.update({id(layer): layer for layer in item._flatten_layers()})
            elif hasattr(item, "per_example"):
                look(item)

    found.update({id(layer): layer for layer in task.model._flatten_layers()})
    look(task)
    return list(found.values())


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
    found: dict[int, tf.Variable] = {}
    for holder in holders:
        for item in _items(list(getattr(holder, "__dict__", {}).values())):
            for variable in _variables(item):
                found.update({id(copy): copy for copy in copies_of(variable)})
    return list(found.values())


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


def copies_of(variable: tf.Variable) -> Sequence[tf.Variable]:
    """Returns the replica-local copies on this worker, or the variable where it has no copies."""
    copies = getattr(variable, "values", None)
    return copies if isinstance(copies, tuple | list) else [variable]
