"""Work done between loops at fixed steps: logs, evaluations, checkpoints."""

from collections.abc import Callable
from typing import Protocol


class Action(Protocol):
    """Something done between loops, such as a checkpoint."""

    def next_step(self, step: int) -> int | None:
        """The first step after `step` at which a loop has to end for this; None if none."""
        ...

    def __call__(self, step: int) -> None:
        """Called after every loop with the step reached."""
        ...


class Periodic:
    """Calls a function at every multiple of a number of steps, and at the last step.

    It tells the trainer where the next such step is, so that no loop runs past it. Where it
    falls depends on the step alone: a resumed run acts at the same steps as a straight one.
    """

    def __init__(self, every: int | None, function: Callable[[int], None], last: int):
        """Keeps the schedule.

        Args:
          every: Steps between calls; None calls at the last step only.
          function: Called with the step.
          last: The last step of the run.
        """
        self._every = every
        self._function = function
        self._last = last

    def next_step(self, step: int) -> int | None:
        """The first step after `step` at which the function is called."""
        if self._every is None:
            return self._last
        return min(self._last, (step // self._every + 1) * self._every)

    def __call__(self, step: int) -> None:
        """Calls the function if its time has come."""
        if step == self._last or (self._every is not None and step % self._every == 0):
            self._function(step)


class EachLoop:
    """Calls a function after every loop, and never makes one end."""

    def __init__(self, function: Callable[[int], None]):
        """Keeps the function."""
        self._function = function

    def next_step(self, step: int) -> int | None:
        """None: it does not matter where loops end."""
        return None

    def __call__(self, step: int) -> None:
        """Calls the function."""
        self._function(step)
