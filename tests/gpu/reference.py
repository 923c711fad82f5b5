"""The figures of cases on one CPU, from a process without GPUs.

    python -m tests.gpu.reference FILE PRECISION CASE...

A process that sees a GPU places some tensors on it, even under a strategy of the CPU.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def on_cpu(precision: str, names: Sequence[str]) -> dict[str, Any]:
    """Returns `parity_cases.reference` of each case, computed by another process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.pickle"
        command = [sys.executable, "-m", "tests.gpu.reference", str(file), precision, *names]
        subprocess.run(command, check=True)
        return pickle.loads(file.read_bytes())


def main(file: str, precision: str, *names: str) -> None:
    from ddl.distribution.devices import configure_devices

    configure_devices(gpus=())
    from tests.training.parity_cases import reference

    Path(file).write_bytes(pickle.dumps({name: reference(name, precision) for name in names}))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(*sys.argv[1:])
    os._exit(0)  # deleting a data set waits up to a minute for its tuner
