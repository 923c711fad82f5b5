"""The figures of cases on one CPU, from a process without GPUs.

    python -m tests.gpu.reference FILE PRECISION CASE...

A process that sees a GPU places some tensors on it, even under a strategy of the CPU.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def on_cpu(precision: str, names: Sequence[str]) -> dict[str, dict[str, list[np.ndarray]]]:
    """Returns `parity_cases.reference` of each case, computed by another process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.npz"
        command = [sys.executable, "-m", "tests.gpu.reference", str(file), precision, *names]
        subprocess.run(command, check=True)
        found: dict[str, dict[str, list[np.ndarray]]] = {}
        with np.load(file) as figures:
            for key, value in figures.items():
                number, _, figure = key.partition(" ")
                found.setdefault(names[int(number)], {})[figure] = [value]
    return found


def main(file: str, precision: str, *names: str) -> None:
    from ddl.distribution.devices import configure_devices

    configure_devices(gpus=())
    from tests.training.parity_cases import reference

    figures = {
        f"{number} {key}": value
        for number, name in enumerate(names)
        for key, (value,) in reference(name, precision).items()
    }
    np.savez(file, **figures)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(*sys.argv[1:])
    os._exit(0)  # deleting a data set waits up to a minute for its tuner
