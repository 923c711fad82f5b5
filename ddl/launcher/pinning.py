"""Pinning of the workers of a cluster on one machine to their own cores or GPU."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddl.choices import Pin
from ddl.errors import ConfigError
from ddl.launcher.tasks import ClusterTask

_TOPOLOGY = Path("/sys/devices/system/cpu")
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SECONDS = 60  # a driver that is not kept loaded takes up to ten seconds for eight GPUs


def pinned(tasks: Sequence[ClusterTask], pin: Pin) -> list[ClusterTask]:
    """Returns the tasks with their places. Workers are pinned; a chief and servers are not.

    With `gpus` a chief and parameter servers see no GPU, since TensorFlow would allocate the memory
    of every GPU.

    Raises:
      ConfigError: If there are not enough cores or GPUs, or CUDA_VISIBLE_DEVICES is wrong.
    """
    if pin == "none":
        return list(tasks)
    workers = [task for task in tasks if task.kind == "worker"]
    of_workers = iter(_on_cores(workers) if pin == "cores" else _on_gpus(workers))
    of_others = {_VARIABLE: ""} if pin == "gpus" else {}
    return [
        next(of_workers) if task.kind == "worker" else replace(task, environment=of_others)
        for task in tasks
    ]


def _on_cores(workers: Sequence[ClusterTask]) -> list[ClusterTask]:
    # Workers wait for the slowest one, so each gets as many cores; some cores may stay unused.
    cores = sorted(os.sched_getaffinity(0), key=_position)
    _check_enough("cores", len(workers), len(cores))
    share = len(cores) // len(workers)
    threads = {"TF_NUM_INTRAOP_THREADS": str(share)}
    shares = [frozenset(cores[first : first + share]) for first in range(0, len(cores), share)]
    return [replace(task, cores=shares[task.index], environment=threads) for task in workers]


def _position(core: int) -> tuple[int, int, int]:
    """Returns a sort key that groups the threads of a physical core and the cores of a socket."""
    topology = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):  # not every system has these files
        return 0, 0, core


def _on_gpus(workers: Sequence[ClusterTask]) -> list[ClusterTask]:
    gpus = visible_gpus()
    _check_enough("gpus", len(workers), len(gpus))
    return [replace(task, environment={_VARIABLE: gpus[task.index]}) for task in workers]


def _check_enough(pin: Pin, wanted: int, found: int) -> None:
    if found < wanted:
        raise ConfigError(
            f"--pin={pin} needs {wanted} {pin} for --num_workers={wanted}, got {found}. "
            "Lower --num_workers, or pass --pin=none."
        )


def visible_gpus() -> list[str]:
    """Returns a value of CUDA_VISIBLE_DEVICES for each GPU that this process may use.

    These are the entries of CUDA_VISIBLE_DEVICES if it is set, else the GPUs that nvidia-smi lists:
    of a machine that divides GPUs by MIG the instances, and no GPU if nvidia-smi fails.

    Raises:
      ConfigError: If CUDA_VISIBLE_DEVICES names a GPU twice, or one that nvidia-smi does not list.
        CUDA would hide it without an error, and the worker would train on a CPU.
    """
    command = ["nvidia-smi", "-L"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        listed = re.findall(r"\(UUID: ([\w/-]+)\)", asked.stdout)
    except (OSError, subprocess.TimeoutExpired):
        listed = []
    named = os.environ.get(_VARIABLE)
    if named is None:
        return [uuid for uuid in listed if uuid.startswith("MIG-")] or listed
    names = [name.strip() for name in named.split(",") if name.strip()]
    for name in names:
        number = int(name) if name.isdecimal() else len(listed)
        # The beginning of a UUID is enough.
        known = number < len(listed) or any(uuid.startswith(name) for uuid in listed)
        if not known or names.count(name) > 1:
            raise ConfigError(
                f"{_VARIABLE} must name GPUs that nvidia-smi -L lists, each once, for --pin=gpus, "
                f"got {named!r}. Correct {name!r}, or leave --pin out."
            )
    return names
