"""Pinning of the workers of a cluster on one machine to their own cores or GPU."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddl.choices import Pin
from ddl.errors import ConfigError
from ddl.launcher.gpus import visible_gpus
from ddl.launcher.tasks import ClusterTask

_ALL_CORES = Path("/sys/devices/system/cpu")


@dataclasses.dataclass(frozen=True)
class Pinning:
    """Placement of a process.

    Attributes:
      cores: Cores that the process may use; None for those of the launcher.
      environment: Environment variables set for the process.
    """

    cores: frozenset[int] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def pin_tasks(tasks: Sequence[ClusterTask], pin: Pin) -> list[Pinning]:
    """Returns the pinning of each task. Workers are pinned; a chief and parameter servers are not.

    With `gpus` a chief and parameter servers see no GPU, since TensorFlow would allocate the memory
    of every GPU.

    Raises:
      ConfigError: If there are not enough cores or GPUs, or the GPUs cannot be found.
    """
    workers = sum(task.kind == "worker" for task in tasks)
    of_others = _with_gpu("") if pin == "gpus" else Pinning()
    if pin == "cores":
        of_workers = _share_cores(workers)
    elif pin == "gpus":
        of_workers = _share_gpus(workers)
    else:
        of_workers = [Pinning()] * workers
    return [of_workers[task.index] if task.kind == "worker" else of_others for task in tasks]


def _share_cores(number: int) -> list[Pinning]:
    # Workers wait for the slowest one, so each gets as many cores; some cores may stay unused.
    cores = sorted(os.sched_getaffinity(0), key=_position)
    share = len(cores) // number
    if share == 0:
        raise ConfigError(
            f"--pin=cores needs {number} cores for --num_workers={number}, got {len(cores)}. "
            "Lower --num_workers, or pass --pin=none."
        )
    return [
        Pinning(
            frozenset(cores[process * share : (process + 1) * share]),
            {"TF_NUM_INTRAOP_THREADS": str(share)},
        )
        for process in range(number)
    ]


def _position(core: int) -> tuple[int, int, int]:
    """Returns a sort key that groups the threads of a physical core and the cores of a socket."""
    topology = _ALL_CORES / f"cpu{core}" / "topology"
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):  # not every system has these files
        return 0, 0, core


def _share_gpus(number: int) -> list[Pinning]:
    gpus = visible_gpus()
    if len(gpus) < number:
        raise ConfigError(
            f"--pin=gpus needs {number} GPUs for --num_workers={number}, got {len(gpus)}. "
            "Lower --num_workers, or list more GPUs in CUDA_VISIBLE_DEVICES."
        )
    return [_with_gpu(gpu) for gpu in gpus[:number]]


def _with_gpu(gpu: str) -> Pinning:
    return Pinning(environment={"CUDA_VISIBLE_DEVICES": gpu})
