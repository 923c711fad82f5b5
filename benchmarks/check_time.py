"""Time of ddl.check: python -m benchmarks.check_time.

The benchmark runs `python -m ddl.check` for a network, a GAN and SAM as a user does, from the start
of the process to its end: 1, 2 and 4 virtual devices with 1 and 2 microbatches, and a resumed run.
Run it alone: the check starts processes, which share the cores. Processor seconds are those of all
of them.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import command
from benchmarks.repeats import spread
from benchmarks.report import Bar, Report, Table

CONFIGS = ("configs/digits_mlp.gin", "examples/gan.gin", "examples/sam.gin")
ROUNDS = 3
LIMIT_SECONDS = 60.0


def seconds(config: str) -> tuple[float, float]:
    """Returns the seconds of a check, which must find no difference, and its processor seconds."""
    arguments = [sys.executable, "-m", "ddl.check", f"--gin_file={config}"]
    start = time.perf_counter()
    process = subprocess.Popen(
        arguments,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(arguments)} ended with status {status}.")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def measure(quick: bool) -> Report:
    """Measures each config in turn, several times."""
    rounds = 1 if quick else ROUNDS
    times: dict[str, list[tuple[float, float]]] = {config: [] for config in CONFIGS}
    for _ in range(rounds):
        for config in CONFIGS:
            times[config].append(seconds(config))
    rows = [
        [config, *(spread(part) for part in zip(*of_config, strict=True))]
        for config, of_config in times.items()
    ]
    bars = [
        Bar(f"`ddl check` of {config}, s", of_config, LIMIT_SECONDS, "at most")
        for config, of_config, _ in rows
    ]
    return Report([Table("One check", ["", "s", "processor s"], rows)], bars)


if __name__ == "__main__":
    command.main(measure)
