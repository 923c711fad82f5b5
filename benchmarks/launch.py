"""Workers started by ddl.launch: python -m benchmarks.launch.

The third tutorial's CNN trains on images of 28×28, once by `ddl.launch --pin=cores`, with a worker
on each core, and as often by `ddl.main` as there are cores, pinned alike, at the same time and
without communication. The efficiency is the speed of a core relative to one run on one core alone.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Options, Report, Table, spread

BATCH = 128  # of a worker
IMAGES = 10_240  # of a worker


def flags(batch: int, folder: str, steps: int) -> list[str]:
    """Returns the flags of ddl.main for some seconds of training."""
    lines = {"DATA": "'synthetic'", "GLOBAL_BATCH_SIZE": batch, "TRAIN_STEPS": steps}
    lines |= {"TRAIN_EPOCHS": None, "EVAL_EVERY": None, "CHECKPOINT_EVERY": None, "LOG_EVERY": 4}
    config = ROOT / "configs" / "fashion_mnist_cnn.gin"
    params = [f"--gin_param={name} = {value}" for name, value in lines.items()]
    return [f"--gin_file={config}", *params, "--mode=train", f"--model_dir={folder}"]


def speed_of(folder: str) -> float:
    """Returns a run's median images per second over its logs, of 4 updates and all replicas."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return float(np.median([x["examples_per_second"] for x in lines if "examples_per_second" in x]))


def speed(commands: dict[str, Sequence[str]], threads: int | None) -> float:
    """Runs commands at the same time, and returns the sum of their speeds, by their folders."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"TF_NUM_INTRAOP_THREADS": str(threads)} if threads else {}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    runs = [subprocess.Popen(c, env=environment, **pipes) for c in commands.values()]  # type: ignore[call-overload]
    for run in runs:
        _, text = run.communicate()
        if run.returncode:
            raise RuntimeError(f"A run ended with {run.returncode}: {text.decode()[-2000:]}")
    return sum(map(speed_of, commands))


def independent(cores: Sequence[int], steps: int) -> float:
    """Returns the images per second of concurrent runs, one on each core."""
    with tempfile.TemporaryDirectory(prefix="launch") as folder:
        commands = {}
        for core in cores:
            pinned = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "ddl.main"]
            own = f"{folder}/{core}"
            commands[own] = [*pinned, "--strategy=one_device", *flags(BATCH, own, steps)]
        return speed(commands, threads=1)


def launched(workers: int, steps: int) -> float:
    """Returns the images per second of workers with a core each."""
    with tempfile.TemporaryDirectory(prefix="launch") as folder:
        launcher = ["-m", "ddl.launch", f"--num_workers={workers}", "--pin=cores", "--"]
        own = f"{folder}/run"
        command = [sys.executable, *launcher, *flags(BATCH * workers, own, steps)]
        return speed({own: command}, threads=None)


def measure(options: Options) -> Report:
    """Measures one core, and 2, 4 and 8 as far as there are cores."""
    steps = 8 if options.quick else IMAGES // BATCH
    cores = sorted(os.sched_getaffinity(0))
    ways = {"one core": lambda: independent(cores[:1], steps)}
    numbers = {"one core": 1}
    for n in (n for n in (2, 4, 8) if n <= len(cores)):
        ways |= {f"{n} launched workers": lambda n=n: launched(n, steps)}
        ways |= {f"{n} runs without communication": lambda n=n: independent(cores[:n], steps)}
        numbers |= {f"{n} launched workers": n, f"{n} runs without communication": n}
    found = harness.interleaved(ways, 1 if options.quick else 3)
    rows = [
        [name, spread(100 * values / found["one core"] / numbers[name]), spread(values)]
        for name, values in found.items()
    ]
    return Report([Table("128 images a worker", ["", "efficiency, %", "images/s"], rows)])


if __name__ == "__main__":
    harness.main(measure)
