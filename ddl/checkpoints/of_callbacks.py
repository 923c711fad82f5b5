"""The variables of a run's callbacks in its checkpoints."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ddl.checkpoints.comparison import some
from ddl.checkpoints.contents import handles_in, lost_of_object, variables_of_object
from ddl.errors import ConfigError


def parts_of_callbacks(
    callbacks: Sequence[object], others: Sequence[tf.Variable]
) -> dict[str, Any]:
    """Returns the variables of each callback; a number follows the name of a further one.

    Args:
      callbacks: Objects whose variables are saved under the names of their classes.
      others: Variables that other parts of the checkpoint hold.

    Raises:
      ConfigError: If two variables of a callback would have the same name.
    """
    parts: dict[str, Any] = {}
    for callback in callbacks:
        if variables := variables_of_object(callback, others):
            name = type(callback).__name__
            known = sum(key.partition(" ")[0] == name for key in parts)
            parts[f"{name} {known + 1}" if known else name] = variables
    return parts


class OfCallbacks:
    """The variables that the callbacks of a run have, which may become more while it trains."""

    def __init__(self, callbacks: Sequence[object], checkpoint: tf.train.Checkpoint):
        """Keeps the arguments.

        Args:
          callbacks: The objects whose variables are saved.
          checkpoint: The checkpoint object that is saved, with the variables they had at the start.
        """
        self._callbacks = callbacks
        self._checkpoint = checkpoint
        self._handles: frozenset[int] = frozenset()

    @property
    def parts(self) -> dict[str, Any]:
        """The variables in the checkpoint object that are of callbacks, as it takes them."""
        parts = getattr(self._checkpoint, "callbacks", None)
        return {} if parts is None else {"callbacks": parts}

    def check(self) -> None:
        """Checks that the checkpoint holds every variable that the callbacks have by now.

        Raises:
          ConfigError: If it lacks one, so that a resumed run would begin with another.
        """
        for callback in self._callbacks:
            self._handles = self._handles or handles_in(self._checkpoint)
            if lost := lost_of_object(callback, self._handles):
                raise ConfigError(
                    f"The callback {type(callback).__name__} has the variables {some(lost)}, which "
                    "no checkpoint holds: they were made after the run began, or no attribute "
                    "leads to them. Make each tf.Variable in __init__ and keep it in an attribute, "
                    "a list or a dict; build a model there, with model.build(shape); and call "
                    "optimizer.build(variables)."
                )
