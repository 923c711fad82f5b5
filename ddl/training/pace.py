"""The length of the training loop's calls, its speed and its waits."""

import math
import time

from ddl.choices import check_positive
from ddl.figures import INPUT_SHARE

_GROWTH, _TARGET_SECONDS = 4, 1.0


class Pace:
    """Adapts the steps per loop to about a second of work, and measures the speed.

    A loop is one Python call. Longer loops save overhead; shorter loops keep the progress bar and
    signals responsive. The length never changes results.

    The speed excludes the first loop, which is mostly tracing, and everything between loops
    (evaluation, checkpoints, logging).

    Attributes:
      clock: Returns seconds.
      steps_per_loop: Largest number of steps of the next loop.
      counts: Whether loops count for the speed; not while a profiler slows them down.
      total_seconds: Seconds spent in loops, tracing included.
      steps_per_second: Steps per second of the latest timed loop; None before the first.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, steps_per_loop: int | None = None) -> None:
        """Starts without an estimate.

        Args:
          steps_per_loop: A fixed number of steps, at least 1; None adapts.

        Raises:
          ConfigError: If `steps_per_loop` is below 1.
        """
        check_positive("Trainer.steps_per_loop", steps_per_loop)
        self._fixed = steps_per_loop
        self.steps_per_loop = steps_per_loop or 1
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0  # since the last `take`
        self.counts = True
        self.total_seconds = 0.0
        self.steps_per_second: float | None = None

    def add(
        self, steps: int, seconds: float, waited: float | None = None, *, traced: bool = False
    ) -> None:
        """Adds a loop.

        Args:
          steps: Its updates.
          seconds: Its time by `clock`.
          waited: Seconds of these in which it waited for batches; None if that is unknown.
          traced: Whether the loop was traced in this time.
        """
        self.total_seconds += seconds
        if traced or not self.counts:
            return
        self._steps += steps
        self._seconds += seconds
        self._waited += math.nan if waited is None else waited
        if steps and seconds > 0:
            self.steps_per_second = steps / seconds
            if self._fixed is None:
                wanted = int(_TARGET_SECONDS * steps / seconds)
                # A short loop predicts a long one poorly: limit the growth.
                most = _GROWTH * max(steps, self.steps_per_loop)
                self.steps_per_loop = max(1, min(wanted, most))

    def take(self) -> tuple[float | None, dict[str, float]]:
        """Returns the figures of the loops since the last call.

        Returns:
          Steps per second; None if no loop was timed. And "input_share", the share of their time
          that loops waited for batches, unless that is unknown.
        """
        steps, seconds, waited = self._steps, self._seconds, self._waited
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        if not steps or seconds <= 0:
            return None, {}
        share = round(min(max(waited / seconds, 0.0), 1.0), 6)
        return steps / seconds, {} if math.isnan(waited) else {INPUT_SHARE: share}
