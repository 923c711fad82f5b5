"""Profiles of some updates of a run by TensorFlow's profiler."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.training.actions import EachLoop
from ddl.training.pace import Pace


def check_steps(steps: tuple[int, int] | None, total: int) -> None:
    """Checks the steps to profile against the length of a run.

    Raises:
      ConfigError: If they are no range of steps of the run.
    """
    if steps is None:
        return
    is_pair = isinstance(steps, Sequence) and len(steps) == 2
    if not is_pair or not all(type(one) is int for one in steps) or not 0 <= steps[0] < steps[1]:
        raise ConfigError(
            "profile must be two steps, the smaller one first, such as (100, 110) for the updates "
            f"after step 100 up to step 110, got {steps!r:.60}."
        )
    first, last = steps
    if last > total:
        raise ConfigError(
            f"profile={first}:{last} ends after the run, which has {total:,} steps. Pass steps up "
            f"to {total}, or train longer."
        )


def missed(steps: tuple[int, int] | None, reached: int) -> str | None:
    """Says which updates to profile a run has made already, in an earlier call.

    Args:
      steps: The step to begin after, and the last step to profile.
      reached: The step from which the run continues.

    Returns:
      A sentence; None if none were made.
    """
    if steps is None or reached <= steps[0]:
        return None
    first, last = steps
    if reached >= last:
        return (
            f"There is no profile of steps {first:,} to {last:,}, since the run continues from "
            f"step {reached:,}. Pass steps from {reached} on."
        )
    return (
        f"The profile begins after step {reached:,}, from which the run continues, not after step "
        f"{first:,}."
    )


class Profiler:
    """Profiles a range of updates.

    Use it on all workers, in eager, cross-replica context. Each worker writes the profile of its
    own devices. The loops meanwhile do not count for the speed. A failure of the profiler is
    reported and does not end the run.
    """

    def __init__(
        self,
        folder: Path,
        steps: tuple[int, int],
        pace: Pace,
        report: Callable[[str], None],
    ):
        """Keeps the arguments; profiles nothing yet.

        Args:
          folder: Folder of this worker's profiles.
          steps: The step to begin after and the last step to profile.
          pace: Measures the speed.
          report: Prints a line.
        """
        self._folder = folder
        self._steps: tuple[int, int] | None = steps
        self._pace = pace
        self._report = report
        self._since = self._reached = 0
        self._until: int | None = None

    @property
    def ending(self) -> "_Ending":
        """Ends the profile. The first action after a loop, so that no other is in the profile."""
        return _Ending(self._end_if_due, self._steps)

    @property
    def beginning(self) -> EachLoop:
        """Begins a profile. The last action after a loop."""
        return EachLoop(self.begin_if_due)

    def begin_if_due(self, step: int) -> None:
        """Begins a profile if one is due before the next loop.

        Args:
          step: The step reached.
        """
        if self._until is not None:
            return
        if self._steps is not None and self._steps[0] <= step < self._steps[1]:
            self._begin(step, self._steps[1])

    def _begin(self, step: int, until: int) -> None:
        try:
            # TensorFlow names a profile by the second, and would overwrite an earlier one.
            tf.profiler.experimental.start(str(self._folder_after(step)), _options())
        except (tf.errors.OpError, OSError) as error:
            self._fail(error)
            return
        self._since, self._reached, self._until = step, step, until
        self._pace.counts = False

    def _end_if_due(self, step: int) -> None:
        self._reached = step
        if self._until is not None and step >= self._until:
            self.end()

    def end(self, step: int | None = None) -> None:
        """Writes the profile in progress, if there is one.

        Args:
          step: The step reached; None for that of the last loop that ended.
        """
        if self._until is None:
            return
        self._reached = self._reached if step is None else step
        since, step, self._until, self._pace.counts = self._since, self._reached, None, True
        try:
            tf.profiler.experimental.stop()
        except (tf.errors.OpError, OSError) as error:
            self._fail(error)
            return
        self._report(
            f"The profile of steps {since:,} to {step:,} is in {self._folder}. With the package "
            f"tensorboard-plugin-profile, tensorboard --logdir={self._folder} shows it."
        )

    def _folder_after(self, step: int) -> Path:
        return self._folder / f"after-step-{step}"

    def _fail(self, error: Exception) -> None:
        self._steps = None  # else the next loop would try again
        first = (str(error).splitlines() or [type(error).__name__])[0]
        self._report(f"There is no profile: {first} Training continues.")


def _options() -> Any:
    """Returns the profiler's options: on CPUs all operations, else it leaves cheap ones out."""
    level = 2 if tf.config.get_visible_devices("GPU") else 3
    return tf.profiler.experimental.ProfilerOptions(host_tracer_level=level)


class _Ending:
    """The action that ends a profile; it also ends loops where a profile begins and ends."""

    def __init__(self, function: Callable[[int], None], steps: tuple[int, int] | None):
        self._function = function
        self._steps = steps or ()

    def next_step(self, step: int) -> int | None:
        """Returns the next end of the range. The same on all workers, unlike a request."""
        return next((one for one in self._steps if one > step), None)

    def __call__(self, step: int) -> None:
        """Ends the profile if it is due."""
        self._function(step)
