"""Periods at which a run calls a function of the user, and the workers that call it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ddl.callbacks.moment import Moment
from ddl.errors import ConfigError, check_choice, check_takes
from ddl.training.trainer import Trainer

Function = Callable[[Moment], Mapping[str, float] | None]
Workers = Literal["all", "chief"]


class Callback:
    """A function that a run calls between loops on the devices.

    Attributes:
      function: The function, of a `Moment`. It may return figures by name, which are logged.
      on: `all` workers call it, or only the `chief`.
    """

    def __init__(self, function: Function, on: Workers = "all"):
        """Checks the arguments.

        Args:
          function: A function of one argument, a `ddl.callbacks.Moment`. An object may be one, by
            `__call__`; then the `tf.Variable`s in its attributes are saved in checkpoints.
          on: `all` workers of a cluster call it, as it must be if it changes the training, or uses
            all devices, as `trainer.evaluate` does; or only the `chief`.

        Raises:
          ConfigError: If the function takes other arguments, or `on` is unknown.
        """
        check_choice(f"{type(self).__name__}.on", on, ("all", "chief"))
        check_takes(f"{type(self).__name__}.function", function, ("moment",))
        if isinstance(function, type):
            raise ConfigError(
                f"{type(self).__name__}.function must be a function of (moment), got the class "
                f"{function.__name__}. Pass an object of it; in gin, write @{function.__name__}()."
            )
        self.function = function
        self.on = on

    @property
    def name(self) -> str:
        """Name of the function in messages."""
        holder = self.holder
        if holder is self:
            return type(self).__name__
        function = getattr(self.function, "__name__", type(self.function).__name__)
        if holder is None or holder is self.function:
            return str(function)
        return f"{type(holder).__name__}.{function}"

    @property
    def holder(self) -> Any:
        """The object whose variables are saved; None for a plain function."""
        if inspect.ismethod(self.function):
            return self.function.__self__
        return None if inspect.isroutine(self.function) else self.function

    def check(self, trainer: Trainer) -> None:
        """Raises ConfigError if the trainer cannot run the callback."""


class Every(Callback):
    """Calls a function at each multiple of a number of steps.

        ddl.fit(trainer, train_epochs=5, callbacks=[Every(1000, show)])

    The loop on the devices ends at these steps, and nowhere else for it. The function is called
    after an evaluation of the same step and before a save, so a checkpoint holds what it changed.
    """

    def __init__(self, steps: int, function: Function, on: Workers = "all"):
        """Checks the arguments.

        Args:
          steps: Number of updates between calls, at least 1.
          function: See `Callback`.
          on: See `Callback`.

        Raises:
          ConfigError: If `steps` is not an integer of at least 1, or as `Callback`.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                f"{type(self).__name__}.steps must be an integer of at least 1, the number of "
                f"updates between calls, got {steps!r:.60}."
            )
        super().__init__(function, on)
        self.steps = steps


class AfterEvaluation(Callback):
    """Calls a function after each evaluation of the run, also after the one at its end."""

    def check(self, trainer: Trainer) -> None:
        """See `Callback`: there must be evaluation data."""
        if not trainer.has_eval_data:
            raise ConfigError(
                f"{type(self).__name__} ({self.name}) needs evaluations, but there is no data to "
                "evaluate on. Bind Trainer.eval_data, or use Every."
            )


class AfterSave(Callback):
    """Calls a function after each save, when the checkpoint's files are on disk.

    The run waits for the files. The function must not change what is trained: the checkpoint would
    not hold it. It returns no figures, for the same reason.
    """
