"""Strong and weak scaling: python -m benchmarks.scaling.

The third tutorial's CNN trains on images of 28×28. Strong scaling keeps the global batch constant,
weak scaling the batch of a replica. The efficiency is the speed relative to that of one replica.

Mirrored on virtual devices of this machine, all replicas share the cores that one device also uses.
An efficiency of 100% therefore means the same images per second on any number of devices, and the
gap to 100% is the cost of mirroring. No speed-up is possible.

Workers are pinned to a core each: one runs `ddl.main`, several run `ddl.launch --pin=cores`. Here
100% means the same images per second for each core. The limit without communication is measured
with as many independent runs at the same time, pinned alike, which share memory and caches as the
workers do.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import command
from benchmarks.loop_overhead import Case
from benchmarks.repeats import interleaved, spread
from benchmarks.report import Plot, Report, Series, Spread, Table
from benchmarks.turns import Contender

GLOBAL_BATCH = 256
WORKER_BATCH = 128
REPLICAS = (1, 2, 4)
ROUNDS = 5
WORKER_ROUNDS = 2
IMAGES_A_CORE = 5120
_ROOT = Path(__file__).parent.parent

Speeds = dict[int, np.ndarray]
"""Images per second in each round, by the number of replicas."""


# ------------------------------------------------------------ mirrored


def mirrored(quick: bool) -> tuple[Speeds, Speeds]:
    """Measures strong and weak scaling over virtual devices."""
    contenders, cases = {}, {}
    for n in REPLICAS:
        case = Case("CNN", GLOBAL_BATCH, n, steps=6, rounds=1 if quick else ROUNDS, targets=())
        weak = dataclasses.replace(case, batch=GLOBAL_BATCH // max(REPLICAS) * n, steps=24 // n)
        cases[n] = [dataclasses.replace(c, steps=1) if quick else c for c in (case, weak)]
        contenders[n] = Contender("benchmarks.contenders:ddl_trainer", cases[n], {})
    speeds = []
    try:
        for number in range(2):
            for contender in contenders.values():
                contender.start_window()
            for contender in contenders.values():
                contender.end_window()
            times = interleaved(
                {str(n): c.window for n, c in contenders.items()}, cases[1][0].rounds
            )
            of = {n: cases[n][number] for n in REPLICAS}
            speeds.append({n: of[n].batch * of[n].steps / times[str(n)] for n in REPLICAS})
            for contender in contenders.values():
                contender.next_case()
    finally:
        for contender in contenders.values():
            contender.close()
    return speeds[0], speeds[1]


# ------------------------------------------------------------ workers


def run_flags(global_batch: int, cores: int, folder: str, quick: bool) -> list[str]:
    """Returns the flags of ddl.main for some seconds of training."""
    steps = max(8, IMAGES_A_CORE * cores // global_batch // 4 * 4)
    lines = {
        "DATA": "'synthetic'",
        "GLOBAL_BATCH_SIZE": global_batch,
        "TRAIN_EPOCHS": None,
        "TRAIN_STEPS": 8 if quick else steps,
        "EVAL_EVERY": None,
        "CHECKPOINT_EVERY": None,
        "LOG_EVERY": 4,
    }
    return [
        f"--gin_file={_ROOT / 'configs' / 'fashion_mnist_cnn.gin'}",
        *(f"--gin_param={name} = {value}" for name, value in lines.items()),
        "--mode=train",
        f"--model_dir={folder}",
    ]


def speed_of(folder: str) -> float:
    """Returns a run's median images per second over its logs, of 4 updates and all replicas."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return float(np.median([x["examples_per_second"] for x in lines if "examples_per_second" in x]))


def independent(batch: int, cores: Sequence[int], quick: bool) -> float:
    """Returns the total images per second of concurrent ddl.main runs, one on each core."""
    with tempfile.TemporaryDirectory(prefix="scaling") as folder:
        runs = []
        for core in cores:
            flags = run_flags(batch, 1, f"{folder}/{core}", quick)
            command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "ddl.main"]
            runs.append(_start([*command, "--strategy=one_device", *flags], threads=1))
        for run in runs:
            _wait(run)
        return sum(speed_of(f"{folder}/{core}") for core in cores)


def together(batch: int, workers: int, quick: bool) -> float:
    """Returns the images per second of workers with a core each."""
    with tempfile.TemporaryDirectory(prefix="scaling") as folder:
        command = [sys.executable, "-m", "ddl.launch", f"--num_workers={workers}", "--pin=cores"]
        flags = run_flags(batch * workers, workers, f"{folder}/run", quick)
        _wait(_start([*command, "--", *flags]))
        return speed_of(f"{folder}/run")


def _start(command: Sequence[str], threads: int | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_ROOT)}
    if threads:
        environment["TF_NUM_INTRAOP_THREADS"] = str(threads)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    _, text = process.communicate()
    if process.returncode:
        raise RuntimeError(
            f"The run ended with status {process.returncode}: {text.decode()[-2000:]}"
        )


def over_workers(quick: bool) -> tuple[Speeds, Speeds, Speeds]:
    """Measures strong, weak and independent scaling for all worker counts with enough cores."""
    cores = sorted(os.sched_getaffinity(0))
    counts = [n for n in (2, 4, 8) if n <= len(cores)]
    contenders = {
        "strong 1": lambda: independent(GLOBAL_BATCH, cores[:1], quick),
        "weak 1": lambda: independent(WORKER_BATCH, cores[:1], quick),
    }
    for n in counts:
        contenders[f"independent {n}"] = lambda n=n: independent(WORKER_BATCH, cores[:n], quick)
        contenders[f"weak {n}"] = lambda n=n: together(WORKER_BATCH, n, quick)
        if GLOBAL_BATCH // n != WORKER_BATCH:
            contenders[f"strong {n}"] = lambda n=n: together(GLOBAL_BATCH // n, n, quick)
    found = interleaved(contenders, 1 if quick else WORKER_ROUNDS)
    return (
        {n: found.get(f"strong {n}", found[f"weak {n}"]) for n in (1, *counts)},
        {n: found[f"weak {n}"] for n in (1, *counts)},
        {n: found.get(f"independent {n}", found["weak 1"]) for n in (1, *counts)},
    )


# ------------------------------------------------------------ the report


def efficiency(speeds: Speeds, replicas: int, cores_grow: bool) -> Spread:
    """Returns the efficiency in percent, per core if every replica has its own."""
    share = replicas if cores_grow else 1
    return spread(100 * speeds[replicas] / speeds[1] / share)


def measure(quick: bool) -> Report:
    """Measures virtual devices and workers."""
    strong, weak = mirrored(quick)
    strong_workers, weak_workers, limit = over_workers(quick)
    mirrored_kinds = {f"global batch {GLOBAL_BATCH}": strong, "64 per replica": weak}
    worker_kinds = {
        f"global batch {GLOBAL_BATCH}": strong_workers,
        f"{WORKER_BATCH} per worker": weak_workers,
        "without communication": limit,
    }
    tables, plots = [], []
    for title, kinds, cores_grow in (
        ("Mirrored on virtual devices", mirrored_kinds, False),
        ("Workers, one core each", worker_kinds, True),
    ):
        rows, speeds_drawn, efficiencies = [], [], []
        for kind, speeds in kinds.items():
            counts = list(speeds)
            shares = [efficiency(speeds, n, cores_grow) for n in counts]
            rates = [spread(speeds[n]) for n in counts]
            rows += [
                [f"{kind}, {n}", share, rate]
                for n, share, rate in zip(counts, shares, rates, strict=True)
            ]
            speeds_drawn.append(Series(kind, counts, rates))
            efficiencies.append(Series(kind, counts, shares))
        tables.append(Table(title, ["", "efficiency, %", "images/s"], rows))
        plots += [
            Plot(title, "replicas", "images/s", speeds_drawn, log_x=True),
            Plot(title, "replicas", "efficiency, %", efficiencies, log_x=True, level=100.0),
        ]
    return Report(tables, plots=plots)


if __name__ == "__main__":
    command.main(measure)
