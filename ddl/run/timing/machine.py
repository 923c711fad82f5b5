"""Memory of this process, and utilization and memory of its GPUs."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddl.figures import GPU_MEMORY, GPU_UTILIZATION, PROCESS_MEMORY

_MIB = 2**20
_STATM = Path("/proc/self/statm")


def memory_of_process(statm: Path = _STATM) -> dict[str, float]:
    """Returns the resident memory of this process in MiB; nothing where Linux's file is missing.

    Args:
      statm: Linux's file, whose second number counts the resident pages.
    """
    try:
        with open(statm, "rb", buffering=0) as file:  # half the time of a text file
            pages = int(file.read().split()[1])
        return {PROCESS_MEMORY: pages * os.sysconf("SC_PAGE_SIZE") / _MIB}
    except (OSError, ValueError, IndexError):
        return {}


class Gpus:
    """The GPUs of this process, as NVIDIA's driver sees them.

    Needs the package nvidia-ml-py, which the extra `cuda` has. Without it, without a driver, and
    for what a GPU does not tell, there are no figures.
    """

    def __init__(self, devices: Sequence[str]):
        """Finds the GPUs.

        Args:
          devices: Names of TensorFlow's physical GPUs, such as "/physical_device:GPU:0".
        """
        self._handles: dict[int, Any] = {}
        numbers = [int(name.rpartition(":")[2]) for name in devices]
        if not numbers:
            return
        try:
            import pynvml
        except ImportError:
            return
        self._library = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        for number in numbers:
            try:
                self._handles[number] = self._handle(number)
            except (pynvml.NVMLError, LookupError):
                continue

    def _handle(self, number: int) -> Any:
        """Returns the driver's handle of a GPU that TensorFlow counts among the visible ones."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        name = str(number) if visible is None else visible.split(",")[number].strip()
        if re.fullmatch(r"\d+", name):
            return self._library.nvmlDeviceGetHandleByIndex(int(name))
        return self._library.nvmlDeviceGetHandleByUUID(name)

    def total_bytes(self) -> dict[int, int]:
        """Returns the memory of each GPU in bytes, by its number."""
        found = {}
        for number, handle in self._handles.items():
            with suppress(self._library.NVMLError):
                found[number] = int(self._library.nvmlDeviceGetMemoryInfo(handle).total)
        return found

    def figures(self) -> dict[str, float]:
        """Returns "gpu_utilization/N", a share of the last moments, and "gpu_memory_mib/N"."""
        found = {}
        for number, handle in self._handles.items():
            try:
                rates = self._library.nvmlDeviceGetUtilizationRates(handle)
                found[f"{GPU_UTILIZATION}/{number}"] = rates.gpu / 100
            except self._library.NVMLError:
                pass  # a part of a GPU (MIG) has no rates of its own
            try:
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
                found[f"{GPU_MEMORY}/{number}"] = memory.used / _MIB
            except self._library.NVMLError:
                pass
        return found
