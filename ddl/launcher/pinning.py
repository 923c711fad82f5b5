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
    num_workers = sum(task.kind == "worker" for task in tasks)
    if pin == "cores":
        of_workers, of_others = _share_cores(num_workers), Pinning()
    elif pin == "gpus":
        of_workers, of_others = _share_gpus(num_workers), _with_gpu("")
    else:
        return [Pinning() for _ in tasks]
    return [of_workers[task.index] if task.kind == "worker" else of_others for task in tasks]


def _share_cores(num_workers: int) -> list[Pinning]:
    # Workers wait for the slowest one, so each gets as many cores; some cores may stay unused.
    cores = sorted(os.sched_getaffinity(0), key=_position)
    share = len(cores) // num_workers
    if share == 0:
        raise ConfigError(
            f"--pin=cores needs {num_workers} cores for --num_workers={num_workers}, got "
            f"{len(cores)}. Lower --num_workers, or leave --pin out."
        )
    return [
        Pinning(
            frozenset(cores[worker * share : (worker + 1) * share]),
            {"TF_NUM_INTRAOP_THREADS": str(share)},
        )
        for worker in range(num_workers)
    ]


def _position(core: int) -> tuple[int, int, int]:
    """Returns a sort key that groups the threads of a physical core and the cores of a socket."""
    topology = _ALL_CORES / f"cpu{core}" / "topology"
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):  # not every system has these files
        return 0, 0, core


def _share_gpus(num_workers: int) -> list[Pinning]:
    gpus = visible_gpus()
    if len(gpus) < num_workers:
        raise ConfigError(
            f"--pin=gpus needs {num_workers} GPUs for --num_workers={num_workers}, got "
            f"{len(gpus)}. Lower --num_workers, or list more GPUs in CUDA_VISIBLE_DEVICES."
        )
    return [_with_gpu(gpu) for gpu in gpus[:num_workers]]


def _with_gpu(gpu: str) -> Pinning:
    return Pinning(environment={"CUDA_VISIBLE_DEVICES": gpu})
