"""Settings that a Trainer reads once; a later change raises an error instead of having no effect.

These are its arguments and attributes, and the set of trained variables.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras

from ddl.errors import ConfigError, did_you_mean
from ddl.tasks.parts import models_of
from ddl.tasks.task import Task

_NEW_TRAINER = "Create a new Trainer with a new optimizer."
_INSTEAD = {"learning_rate": "Assign to trainer.optimizer.learning_rate instead."}


class TrainedVariables:
    """The choice of trained variables, as it was when the trainer was created."""

    def __init__(self, task: Task, layers: Sequence[keras.layers.Layer]):
        """Records the choice.

        Args:
          task: The trainer's task.
          layers: The task's layers.
        """
        self._layers, self._models = layers, models_of(task)
        self._were = list(self._are())

    def check(self) -> None:
        """Raises ConfigError if a layer or model now trains other variables."""
        for (place, was), (_, now) in zip(self._were, self._are(), strict=True):
            if was != now:
                raise ConfigError(
                    f"Changing {place} has no effect: it was {was!r:.80} when the trainer was "
                    f"created, and is now {now!r:.80}. {_NEW_TRAINER}"
                )

    def _are(self) -> Iterator[tuple[str, Any]]:
        for layer in self._layers:
            yield f"trainable of layer {layer.name!r}", layer.trainable
        for name, model in self._models.items():
            paths = [variable.path for variable in model.trainable_variables]
            yield f"the list of trainable variables of task.{name}", paths


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
