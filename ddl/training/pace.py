"""The length of the training loop's calls, its speed and waits, and how busy GPUs are."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf

from ddl.choices import check_positive
from ddl.figures import GPU_UTILIZATION, INPUT_SHARE

_GROWTH = 4


class Pace:
    """Adapts the steps per loop to about a second of work, and measures the speed.

    A loop is one Python call. Longer loops save overhead; shorter loops keep the progress bar and
    signals responsive. The length never changes results.

    The speed excludes the first loop, which is mostly tracing, and everything between loops
    (evaluation, checkpoints, logging).

    Attributes:
      steps_per_loop: Largest number of steps of the next loop.
      counts: Whether loops count for the speed; not while a profiler slows them down.
      total_seconds: Seconds spent in loops, tracing included.
      steps_per_second: Steps per second of the latest timed loop; None before the first.
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
        check_positive("Trainer.steps_per_loop", steps_per_loop)
        self._fixed = steps_per_loop
        self._target = target_seconds
        self.steps_per_loop = steps_per_loop or 1
        self._steps, self._seconds = 0, 0.0
        self._timed = self._waited = 0.0  # since the last `take_input_share`
        self.clock = clock
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
        self._timed += seconds
        self._waited += math.nan if waited is None else waited
        if steps and seconds > 0:
            self.steps_per_second = steps / seconds
            if self._fixed is None:
                wanted = int(self._target * steps / seconds)
                # A short loop predicts a long one poorly: limit the growth.
                most = _GROWTH * max(steps, self.steps_per_loop)
                self.steps_per_loop = max(1, min(wanted, most))

    def take_steps_per_second(self) -> float | None:
        """Returns the steps per second since the last call; None if no loop was timed."""
        speed = self._steps / self._seconds if self._steps and self._seconds > 0 else None
        self._steps, self._seconds = 0, 0.0
        return speed

    def take_input_share(self) -> float | None:
        """Returns the share of their time that loops waited for batches, since the last call.

        None if no loop was timed, or if the waits are unknown.
        """
        share = self._waited / self._timed if self._timed else math.nan
        self._timed = self._waited = 0.0
        return None if math.isnan(share) else round(min(max(share, 0.0), 1.0), 6)


class Monitor:
    """Measures this process between two logs. Eager, on the chief alone."""

    def __init__(self, trainer: Any):
        """Begins to measure.

        Args:
          trainer: The `ddl.Trainer`, restored.
        """
        self._pace: Pace = trainer.pace
        self._pace.take_input_share()
        self._gpus = _handles()

    def figures(self) -> dict[str, float]:
        """Returns the figures of the time since the last call, and begins anew.

        Returns:
          "input_share", the share of the training loop's time in which it waited for batches, and
          "gpu_utilization/N", the share of the last moments in which GPU N was busy. Figures that
          cannot be measured are missing.
        """
        share = self._pace.take_input_share()
        found = {} if share is None else {INPUT_SHARE: share}
        for number, handle in self._gpus.items():
            import pynvml

            with suppress(pynvml.NVMLError):  # a part of a GPU has no rates
                busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                found[f"{GPU_UTILIZATION}/{number}"] = busy / 100
        return found


def _handles() -> dict[int, Any]:
    """Returns the driver's handle of each visible GPU; none without the package nvidia-ml-py."""
    found: dict[int, Any] = {}
    with suppress(Exception):  # not installed, or no driver
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        for device in tf.config.get_visible_devices("GPU"):
            number = int(device.name.rpartition(":")[2])
            name = str(number) if visible is None else visible.split(",")[number].strip()
            by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            found[number] = by_index(int(name)) if name.isdecimal() else by_uuid(name)
    return found
