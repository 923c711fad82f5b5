"""How many steps one call of the training loop runs, and how fast they are."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddl.errors import ConfigError

_GROWTH = 4


class Pace:
    """Adapts the steps a loop to about a second of work, and measures the speed.

    A loop is one Python call: longer ones save overhead, shorter ones keep the progress bar
    alive and signals answered. The choice never changes results.

    The first loop after each trace is left out of the speed, since most of it is tracing; so
    is everything between loops (evaluation, checkpoints, logging).
    """

    def __init__(
        self,
        steps_per_loop: int | None = None,
        target_seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts without an estimate.

        Args:
          steps_per_loop: A fixed number of steps; None adapts.
          target_seconds: What one loop should take.
          clock: Returns seconds; another one serves tests.
        """
        if steps_per_loop is not None and steps_per_loop < 1:
            raise ConfigError(f"steps_per_loop is {steps_per_loop}; it is 1 or more, or None")
        self._fixed = steps_per_loop
        self._target = target_seconds
        self._clock = clock
        self._next = steps_per_loop or 1
        self._steps = 0
        self._seconds = 0.0
        self.total_seconds = 0.0
        """Time spent in loops, tracing included, and in those of the runs that this one goes on
        with."""
        self.steps_per_second: float | None = None
        """Speed of the latest loop that was timed; None before it."""

    @property
    def steps_per_loop(self) -> int:
        """How many steps the next loop should run at the most."""
        return self._next

    @contextmanager
    def loop(self) -> Iterator["LoopTimer"]:
        """Times one loop; the body says on the timer how many steps it ran."""
        timer = LoopTimer()
        start = self._clock()
        yield timer
        seconds = self._clock() - start
        self.total_seconds += seconds
        if not timer.traced:
            self._record(timer.steps, seconds)

    def _record(self, steps: int, seconds: float) -> None:
        self._steps += steps
        self._seconds += seconds
        if steps and seconds > 0:
            self.steps_per_second = steps / seconds
        if self._fixed is None and steps:
            wanted = int(self._target * steps / max(seconds, 1e-6))
            # A short loop says little about a long one: grow towards the estimate.
            self._next = max(1, min(wanted, _GROWTH * max(steps, self._next)))

    def take_steps_per_second(self) -> float | None:
        """Speed since the last call of this method; None where nothing was measured."""
        speed = self._steps / self._seconds if self._steps and self._seconds > 0 else None
        self._steps, self._seconds = 0, 0.0
        return speed


class LoopTimer:
    """What one loop tells its `Pace`."""

    steps = 0
    traced = False
