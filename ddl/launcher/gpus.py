"""The GPUs that NVIDIA's driver shows to a process, found without TensorFlow."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from ddl.errors import ConfigError

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SECONDS = 60  # a driver that is not kept loaded takes up to ten seconds for eight GPUs
_LISTED = re.compile(r"^ *(GPU|MIG)\b.*\(UUID: ([\w/-]+)\)", re.MULTILINE)
# The driver's library keeps GPUs open, which the launcher must not do.
_ASK_DRIVER = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(str(error))
count = ctypes.c_int()
status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if status not in (0, 100):  # 100: there is no GPU
    sys.exit(f"cuInit returns status {status}")
print(count.value)
"""


def visible_gpus() -> list[str]:
    """Returns a value of CUDA_VISIBLE_DEVICES for each GPU that this process may use.

    An instance of a GPU that is divided by MIG counts as a GPU. If CUDA_VISIBLE_DEVICES is set, it
    determines the GPUs and their order; as for CUDA, entries after one that does not exist, such as
    -1, are ignored.

    Raises:
      ConfigError: If CUDA_VISIBLE_DEVICES names a GPU twice, or the driver cannot be asked.
    """
    visible = os.environ.get(_VARIABLE)
    if visible is None:
        gpus = _listed_gpus()
        if gpus is None:
            return [str(number) for number in range(_number_by_driver())]
        return gpus
    names = [name.strip() for name in visible.split(",")]
    names = list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{_VARIABLE} must name each GPU once for --pin=gpus, got {visible!r}. Workers would "
            "share a GPU; remove the repetition."
        )
    known = _listed_gpus() if names else None
    if known is None:
        return names
    return list(itertools.takewhile(lambda name: _exists(name, known), names))


def _listed_gpus() -> list[str] | None:
    """Returns the UUIDs that nvidia-smi lists, instances in place of divided GPUs.

    None if there is no nvidia-smi, or if it fails.
    """
    try:
        result = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    gpus: list[tuple[str, list[str]]] = []  # each GPU with its instances
    for kind, uuid in _LISTED.findall(result.stdout):
        if kind == "GPU":
            gpus.append((uuid, []))
        elif gpus:
            gpus[-1][1].append(uuid)
    return [name for uuid, instances in gpus for name in instances or [uuid]]


def _exists(name: str, known: Sequence[str]) -> bool:
    """Returns whether an entry of CUDA_VISIBLE_DEVICES names one of the GPUs `known`.

    With MIG, numbers and UUIDs of GPUs are not looked up, since `known` has the instances.
    """
    if any(uuid.startswith("MIG-") for uuid in known):
        return True
    if name.isdecimal():
        return int(name) < len(known)
    return any(uuid.startswith(name) for uuid in known)  # the beginning of a UUID is enough


def _number_by_driver() -> int:
    """Returns the number of GPUs that the driver's library finds, asked in a process of its own.

    Raises:
      ConfigError: If there is no driver.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _ASK_DRIVER], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise ConfigError(
            "--pin=gpus needs NVIDIA's driver, but neither nvidia-smi nor libcuda.so.1 answers: "
            f"{asked.stderr.strip().splitlines()[-1]}. Install the driver, list the GPUs in "
            f"{_VARIABLE}, or leave --pin out."
        )
    return int(asked.stdout)
