"""The number of steps per call of the training loop, and the measured speed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddl.errors import ConfigError

_GROWTH = 4


class Pace:
    """Adapts the steps per loop to about a second of work, and measures the speed.

    A loop is one Python call. Longer loops save overhead; shorter loops keep the progress bar and
    signals responsive. The length never changes results.

    The speed excludes the first loop after each trace, which is mostly tracing, and everything
    between loops (evaluation, checkpoints, logging).
    """

    def __init__(
        self,
        steps_per_loop: int | None = None,
        target_seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts without an estimate.

        Args:
          steps_per_loop: A fixed number of steps, at least 1; None adapts.
          target_seconds: Target duration of one loop, in seconds.
          clock: Returns seconds; tests pass another clock.

        Raises:
          ConfigError: If `steps_per_loop` is below 1.
        """
        if steps_per_loop is not None and steps_per_loop < 1:
            raise ConfigError(
                f"Trainer.steps_per_loop must be at least 1, or None, got {steps_per_loop}."
            )
        self._fixed = steps_per_loop
        self._target = target_seconds
        self._clock = clock
        self._next = steps_per_loop or 1
        self._steps = 0
        self._seconds = 0.0
        self.counts = True
        """Whether loops count for the speed; not while a profiler slows them down."""
        self.timed_seconds = 0.0
        """Seconds of the loops that count for the speed."""
        self.total_seconds = 0.0
        """Seconds spent in loops, tracing included; a resumed run adds to the restored value."""
        self.steps_per_second: float | None = None
        """Steps per second of the latest timed loop; None before the first."""

    @property
    def steps_per_loop(self) -> int:
        """Largest number of steps of the next loop."""
        return self._next

    @contextmanager
    def loop(self) -> Iterator["LoopTimer"]:
        """Times one loop; the body sets `steps` and `traced` on the timer."""
        timer = LoopTimer()
        start = self._clock()
        yield timer
        seconds = self._clock() - start
        self.total_seconds += seconds
        if not timer.traced and self.counts:
            self._record(timer.steps, seconds)

    def _record(self, steps: int, seconds: float) -> None:
        self._steps += steps
        self._seconds += seconds
        self.timed_seconds += seconds
        if steps and seconds > 0:
            self.steps_per_second = steps / seconds
        if self._fixed is None and steps:
            wanted = int(self._target * steps / max(seconds, 1e-6))
            # A short loop predicts a long one poorly: limit the growth.
            self._next = max(1, min(wanted, _GROWTH * max(steps, self._next)))

    def take_steps_per_second(self) -> float | None:
        """Returns the steps per second since the last call; None if no loop was timed."""
        speed = self._steps / self._seconds if self._steps and self._seconds > 0 else None
        self._steps, self._seconds = 0, 0.0
        return speed


class LoopTimer:
    """One loop's report to its `Pace`.

    Attributes:
      steps: Number of steps that the loop ran.
      traced: Whether the loop was traced in this call.
    """

    steps = 0
    traced = False
