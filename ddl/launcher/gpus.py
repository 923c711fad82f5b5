"""A GPU for each worker of a cluster on one machine."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from ddl.errors import ConfigError
from ddl.launcher.tasks import ClusterTask

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SECONDS = 60  # a driver that is not kept loaded takes up to ten seconds for eight GPUs


def with_a_gpu_each(tasks: Sequence[ClusterTask]) -> list[ClusterTask]:
    """Returns the tasks, each worker with a GPU of its own.

    A chief and parameter servers see no GPU, since TensorFlow would allocate the memory of every
    GPU.

    Raises:
      ConfigError: If there are not enough GPUs, or CUDA_VISIBLE_DEVICES is wrong.
    """
    gpus, workers = visible_gpus(), sum(task.kind == "worker" for task in tasks)
    if len(gpus) < workers:
        raise ConfigError(
            f"--pin_gpus needs {workers} GPUs for --num_workers={workers}, got {len(gpus)}. Lower "
            "--num_workers, or leave --pin_gpus out."
        )
    of_task = [gpus[task.index] if task.kind == "worker" else "" for task in tasks]
    return [replace(x, environment={_VARIABLE: y}) for x, y in zip(tasks, of_task, strict=True)]


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
        whole = [uuid for uuid in listed if uuid.startswith("GPU-")]
        number = int(name) if name.isdecimal() else len(whole)
        # The beginning of a UUID is enough.
        known = number < len(whole) or any(uuid.startswith(name) for uuid in listed)
        if not known or names.count(name) > 1:
            raise ConfigError(
                f"{_VARIABLE} must name GPUs that nvidia-smi -L lists, each once, for --pin_gpus, "
                f"got {named!r}. Correct {name!r}, or leave --pin_gpus out."
            )
    return names
