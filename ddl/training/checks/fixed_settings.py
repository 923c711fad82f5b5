"""Settings that are read once; a later change raises an error instead of having no effect.

The Trainer reads its arguments and the set of trained variables in its constructor. The training
loop reads everything that is not a variable while it is traced: a dropout rate, an optimizer's
momentum, a task's label smoothing. Known as settings are attributes that are named after arguments
of a constructor, the numbers and texts of a task that its code read in the first trace, and the
code of its methods.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl.errors import ConfigError, did_you_mean
from ddl.optimizers.checks import check_arguments
from ddl.tasks.parts import models_of
from ddl.tasks.task import Task
from ddl.training.checks.task_code import Code, code_of_method

# Id of the owner, name of the setting, value.
_Settings: TypeAlias = Iterator[tuple[int, str, Any]]

_ARRAY = (np.ndarray, np.generic, tf.__internal__.EagerTensor)

# An empty list or dict may be a record that a task keeps, and is no setting.
_RECORD = object()

_NEW_TRAINER = "Create a new Trainer with a new optimizer."
_INSTEAD = {"learning_rate": "Assign to trainer.optimizer.learning_rate instead."}


class FixedSettings:
    """The settings that a trainer read in its constructor and while its loops were traced."""

    def __init__(
        self,
        task: Task,
        layers: Sequence[keras.layers.Layer],
        optimizers: Sequence[keras.optimizers.Optimizer],
        variables: Sequence[keras.Variable],
        read: Collection[str] = (),
    ):
        """Records which variables are trained.

        Args:
          task: The trainer's task.
          layers: The task's layers.
          optimizers: The trainer's optimizers.
          variables: The trained variables.
          read: Names of further attributes of the task that are settings.
        """
        self._optimizers = optimizers
        self._task = task
        _check_unread(task)
        traced = "the loop was traced"
        self._trained = _Readings(lambda: _trainability(task, layers), "the trainer was created")
        self._trained.take()
        self._of_task = _Readings(lambda: _settings_of_task(task, layers, read), traced)
        self._of_update = _Readings(lambda: _settings_of_update(optimizers, variables), traced)

    def check_for_training(self) -> None:
        """Raises ConfigError if a setting that the training loop has read was changed.

        Also raises it if the optimizer has an argument that Keras applies per replica.
        """
        for optimizer in self._optimizers:
            check_arguments(optimizer)
        _check_unread(self._task)
        self._trained.check()
        self._of_task.check()
        self._of_update.check()

    def check_for_evaluation(self) -> None:
        """Raises ConfigError if a setting that the evaluation has read was changed."""
        _check_unread(self._task)
        self._of_task.check()

    def take_for_training(self) -> None:
        """Records the settings of task and update. Call it after the training loop's trace."""
        self._of_task.take()
        self._of_update.take()

    def take_for_evaluation(self) -> None:
        """Records the settings of the task. Call it after the evaluation's trace."""
        self._of_task.take()


class _Readings:
    """A record of settings at one time."""

    def __init__(self, read: Callable[[], _Settings], since: str):
        self._read = read
        self._since = since
        self._were: dict[tuple[int, str], Any] | None = None

    def take(self) -> None:
        self._were = self._are()

    def check(self) -> None:
        if self._were is None:
            return
        are = self._are()
        for key in {**self._were, **are}:
            was, now = self._were.get(key), are.get(key)
            if was is not _RECORD and not _same(was, now):
                before = _short(was) if key in self._were else "not set"
                raise ConfigError(
                    f"Changing {key[1]} has no effect: it was {before} when {self._since}, "
                    f"and is now {_short(now)}. {_NEW_TRAINER} To change a number during training, "
                    "use a tf.Variable or a schedule."
                )

    def _are(self) -> dict[tuple[int, str], Any]:
        return {(owner, place): _frozen(value) for owner, place, value in self._read()}


def _trainability(task: Task, layers: Sequence[keras.layers.Layer]) -> _Settings:
    for layer in layers:
        yield id(layer), f"trainable of layer {layer.name!r}", layer.trainable
    for model in models_of(task).values():
        paths = [variable.path for variable in model.trainable_variables]
        yield id(model), "the list of the model's trainable variables", paths


def _settings_of_task(
    task: Task, layers: Sequence[keras.layers.Layer], read: Collection[str]
) -> _Settings:
    yield from _arguments("the task", task)
    for name in read:
        value = vars(task)[name] if name in vars(task) else code_of_method(task, name)
        yield id(task), f"{name} of the task", _copied(value)
    for layer in layers:
        yield from _arguments(f"layer {layer.name!r}", layer)


def _settings_of_update(
    optimizers: Sequence[keras.optimizers.Optimizer], variables: Sequence[keras.Variable]
) -> _Settings:
    for optimizer in optimizers:
        yield from _arguments("the optimizer", optimizer)
        schedule = optimizer._learning_rate
        while isinstance(schedule, LearningRateSchedule):
            yield from _arguments(f"the {type(schedule).__name__}", schedule)
            schedule = getattr(schedule, "schedule", None)
    for variable in variables:
        yield id(variable), f"the regularizer of {variable.path}", variable.regularizer
        yield id(variable), f"the constraint of {variable.path}", variable.constraint


def check_attribute(trainer: Any, name: str, fixed: Collection[str]) -> None:
    """Checks that a public attribute of a constructed trainer may be set.

    Args:
      trainer: The trainer. Subclasses may add attributes, and methods may be replaced.
      name: Name of the attribute.
      fixed: Names of the trainer's attributes and of its constructor's arguments.

    Raises:
      ConfigError: If the trainer has already read the attribute, or has none of this name.
    """
    in_class = getattr(type(trainer), name, None)
    if callable(in_class) or getattr(in_class, "fset", None) is not None:
        return
    if name in fixed or in_class is not None:
        remedy = _INSTEAD.get(name, _NEW_TRAINER)
        raise ConfigError(
            f"trainer.{name} cannot be changed after the Trainer is created. {remedy}"
        )
    if type(trainer).__module__.startswith("ddl."):
        raise ConfigError(
            "The Trainer has no attribute "
            f"{name!r}.{did_you_mean(name, {*fixed, *dir(type(trainer))})} Pass arguments to its "
            "constructor."
        )


def _arguments(place: str, thing: Any) -> _Settings:
    """Yields the attributes of an object that are named after its constructor's arguments."""
    attributes = getattr(thing, "__dict__", {})
    cls: Any = type(thing)
    for argument in _names_of_arguments(cls):
        for name in (argument, f"_{argument}"):
            if name in attributes:
                yield id(thing), f"{name} of {place}", attributes[name]


def _check_unread(task: Task) -> None:
    """Raises ConfigError if a task of ddl's has an attribute that its code does not read.

    Its constructor keeps most arguments under other names. A task of the user's own may have
    attributes for its own code.
    """
    cls: Any = type(task)
    if not cls.__module__.startswith("ddl."):
        return
    for name in _names_of_arguments(cls):
        if name in vars(task) and name not in _names_in_constructors(cls):
            raise ConfigError(
                f"Setting {name} of a {cls.__name__} has no effect, because its constructor has "
                f"read it. Create a new {cls.__name__} with {name}={_short(vars(task)[name])}, and "
                "a new Trainer."
            )


@functools.lru_cache(maxsize=256)  # bounded, so that classes of a notebook do not stay alive
def _names_in_constructors(cls: type) -> frozenset[str]:
    """Returns the names of the attributes that the constructors of a class use."""
    constructors: Any = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in constructors]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


@functools.lru_cache(maxsize=256)  # bounded, so that classes of a notebook do not stay alive
def _names_of_arguments(cls: type) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for base in inspect.getmro(cls):
        if "__init__" in vars(base) and base is not object:
            names.update(dict.fromkeys(inspect.signature(vars(base)["__init__"]).parameters))
    return tuple(names)


def _frozen(value: Any) -> Any:
    """Returns the value; for a list or mapping, a copy that no longer changes."""
    if isinstance(value, (list, dict)) and not value:
        return _RECORD
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _copied(value: Any) -> Any:
    """Returns a copy of a small array of numbers, which may be changed in place."""
    is_small = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.nbytes < 2**20
    return value.copy() if is_small and not np.isnan(value).any() else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, _ARRAY) and isinstance(other, _ARRAY):
        # A restored keras.layers.Normalization makes its moments anew.
        return one is other or (one.dtype == other.dtype and np.array_equal(one, other))
    plain = (bool, int, float, complex, str, bytes, Code)
    return one is other or (isinstance(one, plain) and isinstance(other, plain) and one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
