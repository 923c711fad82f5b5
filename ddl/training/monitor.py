"""Figures of the machine beside those of the training: waits for input, and busy GPUs."""

import os
import re
from typing import Any

import tensorflow as tf

from ddl.figures import GPU_UTILIZATION, INPUT_SHARE
from ddl.training.trainer import Trainer


class Monitor:
    """Measures this process between two logs. Eager, on the chief alone."""

    def __init__(self, trainer: Trainer):
        """Begins to measure.

        Args:
          trainer: The trainer, restored.
        """
        self._trainer = trainer
        self._last = self._seconds()
        self._gpus = _handles()

    def figures(self) -> dict[str, float]:
        """Returns the figures of the time since the last call, and begins anew.

        Returns:
          "input_share", the share of the training loop's time in which it waited for batches, and
          "gpu_utilization/N", the share of the last moments in which GPU N was busy. Figures that
          cannot be measured are missing.
        """
        found = {}
        last, self._last = self._last, self._seconds()
        if last is not None and self._last is not None:
            waited, trained = (now - before for now, before in zip(self._last, last, strict=True))
            if trained > 0:
                found[INPUT_SHARE] = round(min(max(waited / trained, 0.0), 1.0), 6)
        for number, handle in self._gpus.items():
            if (busy := _busy(handle)) is not None:
                found[f"{GPU_UTILIZATION}/{number}"] = busy
        return found

    def _seconds(self) -> tuple[float, float] | None:
        """Returns the seconds of waits and of loops; None if waits cannot be measured."""
        waited = self._trainer.seconds_of_input
        return None if waited is None else (waited, self._trainer.pace.timed_seconds)


def _handles() -> dict[int, Any]:
    """Returns the driver's handle of each visible GPU; none without the package nvidia-ml-py."""
    found: dict[int, Any] = {}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver
        return found
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for device in tf.config.get_visible_devices("GPU"):
        number = int(device.name.rpartition(":")[2])
        try:
            name = str(number) if visible is None else visible.split(",")[number].strip()
            of_index = re.fullmatch(r"\d+", name)
            found[number] = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if of_index
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
        except (pynvml.NVMLError, LookupError):
            continue
    return found


def _busy(handle: Any) -> float | None:
    """Returns the share of the last moments in which a GPU was busy; None for parts of GPUs."""
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None
