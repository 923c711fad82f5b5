"""The variables in a checkpoint, under names that are the same in every process.

`tf.train.Checkpoint` follows attributes and misses the variables that Keras 3 tracks in lists and
dicts (tests/checkpoints/test_contents.py fails when that changes). This module names the missed
variables by the attributes, indices and keys that lead to them, such as `blocks/0/kernel`.
"""

import enum
import functools
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ddl.checkpoints.comparison import some
from ddl.checkpoints.slots import WholeSlot
from ddl.errors import ConfigError
from ddl.tasks.parts import attributes_of, copies_of, layers_of, models_of, variables_of
from ddl.tasks.task import Task

AnyVariable: TypeAlias = keras.Variable | tf.Variable

_HOLDERS = (
    *(keras.layers.Layer, keras.metrics.Metric, keras.random.SeedGenerator),
    *(tf.Module, tf.random.Generator),
)

IN_CONTAINERS = "in_containers"
"""Part of a checkpoint with the model's variables in lists and dicts."""

IN_TASK = "task"
"""Part of a checkpoint with the task's variables outside its model."""

BESIDE_ATTRIBUTES = (f"{IN_CONTAINERS}/", f"{IN_TASK}/")
"""Path prefixes of the variables that `tf.train.Checkpoint` misses."""


def model_parts(task: Task) -> dict[str, Any]:
    """Collects the variables that evaluation and export need.

    States of the layers' random generators are left out: a trainer never changes them.

    Args:
      task: The task; it holds the model and may hold further layers and variables.

    Returns:
      Keyword arguments for `tf.train.Checkpoint`.

    Raises:
      ConfigError: If a variable of the task has no name that is the same in every process.
    """
    models = models_of(task)
    parts: dict[str, Any] = dict(models) if set(models) == {"model"} else {"models": models}
    layers = layers_of(task)
    seen = {id(generator.state.value) for layer in layers for generator in layer._seed_generators}
    seen |= {id(v) for v in saved_variables(tf.train.Checkpoint(**parts))}
    places: list[tuple[str, tuple[str, ...], object, list[keras.Variable]]] = [
        (IN_CONTAINERS, () if set(models) == {"model"} else (name,), model, model.variables)
        for name, model in models.items()
    ]
    of_layers = [v for layer in layers for v in layer.variables]
    for part, first, holder, variables in [*places, (IN_TASK, (), task, of_layers)]:
        found = {(*first, *path): v for path, v in _named(holder).items()}
        named = {path: v for path, v in found.items() if id(_bare(v)) not in seen}
        seen |= {id(_bare(v)) for v in named.values()}
        lost = [v.path for v in variables if id(_bare(v)) not in seen]
        if lost:
            raise ConfigError(
                f"A checkpoint cannot hold the variables {some(lost)} of {type(holder).__name__}: "
                "no attribute leads to them. Keep the layers that own them in attributes, or in "
                "lists and dicts in attributes; a set has no order."
            )
        if named:
            parts[part] = {**parts.get(part, {}), **_nested(named)}
    return parts


def variables_of_object(holder: object, beside: Iterable[tf.Variable] = ()) -> dict[str, Any]:
    """Collects the variables that attributes of an object lead to, for `tf.train.Checkpoint`.

    Those of optimizers are included, by their numbers: their names depend on those of the model.

    Args:
      holder: The object, such as a callback.
      beside: Variables that other parts of the checkpoint hold.

    Raises:
      ConfigError: If two variables would have the same name.
    """
    others = {id(v) for v in beside}
    named = _named(holder, optimizers=True)
    return _nested({path: v for path, v in named.items() if id(_bare(v)) not in others})


def lost_of_object(holder: object, handles: Container[int]) -> list[str]:
    """Returns the names of an object's variables that a checkpoint does not hold.

    Args:
      holder: The object, such as a callback.
      handles: From `handles_in` the checkpoint.
    """
    found = [("/".join(path), _bare(v)) for path, v in _named(holder, optimizers=True).items()]
    known = {id(copy.handle) for _, v in found for copy in copies_of(v)}
    # Those that no path leads to, such as in a set.
    others = [v for v in variables_of([holder]) if id(v.handle) not in known]
    found += [(v.name.split(":")[0], v) for v in others]
    return [
        name for name, v in found if any(id(copy.handle) not in handles for copy in copies_of(v))
    ]


def check_covers(checkpoint: tf.train.Checkpoint, used: Iterable[tf.Variable]) -> None:
    """Checks that a checkpoint holds every variable that training uses.

    Args:
      checkpoint: The checkpoint object that is saved.
      used: Variables that the training loop reads or writes, including replica-local copies.

    Raises:
      ConfigError: If a used variable is not in the checkpoint.
    """
    handles = handles_in(checkpoint)
    lost = sorted({v.name.split(":")[0] for v in used if id(v.handle) not in handles})
    if lost:
        raise ConfigError(
            f"The training step uses the variables {some(lost)}, but neither the model nor the "
            "optimizer nor the task owns them, so no checkpoint would hold them. Keep each one in "
            "an attribute of the task or of a layer."
        )


def handles_in(checkpoint: tf.train.Checkpoint) -> frozenset[int]:
    """Returns the ids of the handles of all variables that a checkpoint saves, of every copy."""
    return frozenset(id(c.handle) for v in saved_variables(checkpoint) for c in copies_of(v))


def saved_variables(checkpoint: tf.train.Checkpoint) -> list[tf.Variable]:
    """Returns all variables that a checkpoint saves, each once."""
    descendants = tf.train.TrackableView(checkpoint).descendants()
    bare = [_bare(v) for v in descendants if isinstance(v, keras.Variable | tf.Variable)]
    bare += [slot.variable for slot in descendants if isinstance(slot, WholeSlot)]
    return list({id(v): v for v in bare}.values())


def _named(holder: object, optimizers: bool = False) -> dict[tuple[str, ...], AnyVariable]:
    """Returns the variables reached by attributes, lists and dicts, by the first path to each.

    Args:
      holder: The object.
      optimizers: Whether to include the variables of optimizers.

    Raises:
      ConfigError: If two variables have the same path, such as under the dict keys 1 and "1".
    """
    named: dict[tuple[str, ...], AnyVariable] = {}
    seen: set[int] = set()

    def look(item: object, path: tuple[str, ...]) -> None:
        if id(item) in seen:
            return
        if isinstance(item, keras.Variable | tf.Variable):
            seen.add(id(item))
            if path in named:
                raise ConfigError(
                    f"Two variables of {type(holder).__name__} would be saved as "
                    f"{'/'.join(path)!r}. Use dict keys that differ as strings."
                )
            named[path] = item
        elif isinstance(item, Mapping):
            for key, value in item.items():
                if isinstance(key, str | int | float | enum.Enum):  # other keys differ by process
                    look(value, (*path, str(key)))
        elif isinstance(item, list | tuple):
            for index, value in enumerate(item):
                look(value, (*path, str(index)))
        elif optimizers and isinstance(item, keras.optimizers.Optimizer):
            look(item.variables, path)
        elif item is holder or isinstance(item, _HOLDERS) or hasattr(item, "per_example"):
            seen.add(id(item))
            for name, value in _held(item):
                look(value, (*path, name))

    look(holder, ())
    return named


def _held(item: object) -> list[tuple[str, Any]]:
    """Returns an object's own attributes, and the layers of a functional model."""
    held: list[tuple[str, Any]] = []
    if isinstance(item, keras.Model) and isinstance(item, _functional_models()):
        held.append(("layers", item.layers))
    own = _names_of_keras() if isinstance(item, keras.layers.Layer) else frozenset()
    attributes = sorted(attributes_of(item).items())
    held += [(k, v) for k, v in attributes if k not in own and not k.startswith("_self_")]
    return held


@functools.cache
def _functional_models() -> tuple[type[keras.Model], ...]:
    """Returns the model classes whose layers are not attributes."""
    inputs = keras.Input([1])
    return keras.Sequential, type(keras.Model(inputs, inputs))


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Returns the attribute names that Keras itself sets on layers and models."""
    inputs = keras.Input([1])
    models = (keras.Model(), keras.Sequential([inputs]), keras.Model(inputs, inputs))
    return frozenset().union(*map(vars, (keras.layers.Layer(), *models)))


def _nested(named: Mapping[tuple[str, ...], AnyVariable]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (*folders, name), variable in named.items():
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = variable
    return nested


def _bare(variable: AnyVariable) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable
