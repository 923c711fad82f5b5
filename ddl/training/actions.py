"""Work done between training loops at fixed steps: logs, evaluations, checkpoints."""

import numbers
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ddl.errors import ConfigError
from ddl.optimizers.schedules import epochs_to_steps


class Action(Protocol):
    """Work done between training loops, such as a checkpoint."""

    def next_step(self, step: int) -> int | None:
        """Returns the first step after `step` at which a loop must end; None if there is none."""
        ...

    def __call__(self, step: int) -> None:
        """Runs the action. The trainer calls it after every loop, with the step reached."""
        ...


class Periodic:
    """Calls a function at every multiple of a number of steps, and at the last step.

    No training loop runs past such a step. The schedule depends only on the step: a resumed run
    calls the function at the same steps as an uninterrupted run.
    """

    def __init__(self, every: int | None, function: Callable[[int], None], last: int):
        """Keeps the schedule.

        Args:
          every: Steps between calls, at least 1; None calls at the last step only.
          function: Called with the step.
          last: The last step of the run.
        """
        self._every = every
        self._function = function
        self._last = last

    def next_step(self, step: int) -> int | None:
        """Returns the first step after `step` at which the function is called."""
        if self._every is None:
            return self._last
        return min(self._last, (step // self._every + 1) * self._every)

    def __call__(self, step: int) -> None:
        """Calls the function if it is due at `step`."""
        if step == self._last or (self._every is not None and step % self._every == 0):
            self._function(step)


class EachLoop:
    """Calls a function after every loop, and never ends a loop."""

    def __init__(self, function: Callable[[int], None]):
        """Keeps the function, which is called with the step."""
        self._function = function

    def next_step(self, step: int) -> int | None:
        """Returns None: loops may end anywhere."""
        return None

    def __call__(self, step: int) -> None:
        """Calls the function."""
        self._function(step)


def length_in_steps(steps: Any, epochs: Any, steps_per_epoch: int | None) -> int:
    """Returns the length of a training in updates.

    Args:
      steps: The length in updates, or None.
      epochs: The length in epochs, or None.
      steps_per_epoch: Updates per epoch.

    Raises:
      ConfigError: Unless exactly one is given, `steps` is an integer of at least 0, and `epochs` a
        finite number of at least 0.
    """
    if (steps is None) == (epochs is None):
        raise ConfigError(
            f"train needs either steps or epochs, got {steps!r:.60} and {epochs!r:.60}. Write "
            "train(steps=1000) or train(epochs=5)."
        )
    if epochs is not None:
        return epochs_to_steps(float(epochs), steps_per_epoch)
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 0:
        raise ConfigError(f"steps must be an integer of at least 0, got {steps!r:.60}.")
    return int(steps)


def checked_actions(actions: Iterable[Action]) -> list[Action]:
    """Returns the actions as a list.

    Raises:
      ConfigError: If an element is not callable or has no `next_step`.
    """
    given = list(actions) if isinstance(actions, Iterable) else [actions]
    for action in given:
        if not (callable(action) and hasattr(action, "next_step")):
            raise ConfigError(
                "actions must be a list of ddl.training.actions.Action, which are callable and "
                f"have next_step, got {action!r:.60}."
            )
    return given
