"""Time to the first step, and memory: python -m benchmarks.first_step.

The benchmark compares `ddl.main` with configs/mnist_mlp.gin to a bare Keras script with the same
network, Adam and batches of 25 (benchmarks/bare_keras.py). Both read 60,000 images from Keras's
cache. Time counts from the start of the process. The imports end when TensorFlow is loaded and the
arguments are parsed. The build covers the data, the model and the optimizer. ddl then traces, which
shortens the first loop, and creates the run's folder and files; Keras traces and compiles within
its first step. With --jit_compile=on XLA compiles within ddl's first loop. The memory is the peak
resident memory until the process ends, 500 updates later. The second table shows what XLA adds to
the first step of a CNN and a GPT, configs/digits_cnn.gin and configs/play_gpt.gin, on the CPU.
"""

import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import command
from benchmarks.repeats import interleaved, spread
from benchmarks.report import Bar, Plot, Report, Series, Table

STEPS = 500
ROUNDS = 5
ROUNDS_OF_XLA = 3
PARTS = ("imports", "build", "trace", "first loop")
MEMORY = "memory, MB"

_FOLDER = Path(__file__).parent


def _of_ddl(config: str, *params: str) -> list[str]:
    """Returns Python's arguments for a run of one of ddl's configs."""
    return [
        *("-m", "benchmarks.first_step_of_ddl"),
        f"--gin_file={_FOLDER.parent / 'configs' / config}",
        *(f"--gin_param={param}" for param in ("TRAIN_EPOCHS = None", *params)),
        *("--mode=train", "--strategy=one_device"),
    ]


_MLP = _of_ddl("mnist_mlp.gin", "DATA = 'fashion_mnist'", f"TRAIN_STEPS = {STEPS}")
COMMANDS = {
    "ddl": _MLP,
    "ddl, --jit_compile=on": [*_MLP, "--jit_compile=on"],
    "Keras": [str(_FOLDER / "bare_keras.py"), str(STEPS)],
}
_NETWORKS = {
    "CNN": _of_ddl("digits_cnn.gin", "TRAIN_STEPS = 20"),
    "GPT": _of_ddl("play_gpt.gin", "TRAIN_STEPS = 20", "WARMUP_STEPS = 10"),
}
WITH_XLA = {
    f"{name}, --jit_compile={choice}": [*given, f"--jit_compile={choice}"]
    for name, given in _NETWORKS.items()
    for choice in ("off", "on")
}


def write_images(folder: Path) -> None:
    """Writes noise into the files of Fashion-MNIST in Keras's cache."""
    generator = np.random.default_rng(0)
    folder = folder / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        images = generator.integers(0, 256, count * 784, np.uint8)
        labels = generator.integers(0, 10, count, np.uint8)
        for kind, header, values in (
            ("images-idx3", (0x803, count, 28, 28), images),
            ("labels-idx1", (0x801, count), labels),
        ):
            content = np.array(header, ">i4").tobytes() + values.tobytes()
            path = folder / f"{name}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content, compresslevel=1))


def one_run(command: Sequence[str], cache: Path) -> dict[str, float]:
    """Returns the seconds of each part up to the first step, and the peak memory in MB."""
    with tempfile.TemporaryDirectory(prefix="first_step") as folder:
        environment = {
            **os.environ,
            "KERAS_HOME": str(cache),
            "FIRST_STEP_TIMES": f"{folder}/times",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        arguments = [sys.executable, *command]
        if command[0] == "-m":
            arguments.append(f"--model_dir={folder}/run")
        start = time.time()
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"{' '.join(arguments)} ended with status {status}.")
        lines = Path(environment["FIRST_STEP_TIMES"]).read_text().splitlines()
    found, before = {}, start
    for name, moment in (line.split("=") for line in lines):
        found[name] = float(moment) - before
        before = float(moment)
    return {**found, "first step": before - start, MEMORY: usage.ru_maxrss / 1024}


def measure(quick: bool) -> Report:
    """Measures the programs, interleaved."""
    with tempfile.TemporaryDirectory(prefix="keras_home") as folder:
        cache = Path(folder)
        write_images(cache)
        for name in COMMANDS:  # loads the files into the page cache
            one_run(COMMANDS[name], cache)
        times, runs = _measured(COMMANDS, cache, 1 if quick else ROUNDS)
        _, of_xla = _measured(WITH_XLA, cache, 1 if quick else ROUNDS_OF_XLA)
    ours, theirs = times["ddl"], times["Keras"]
    memory = {name: np.array([run[MEMORY] for run in runs[name]]) for name in runs}
    rows = [
        [name, *(_of(runs[name], part) for part in ("first step", *PARTS, MEMORY))] for name in runs
    ]
    with_xla = [
        [name, *(_of(of_xla[name], part) for part in ("first step", *PARTS))] for name in of_xla
    ]
    parts = [Series(name, list(PARTS), [_of(runs[name], p, 0.0) for p in PARTS]) for name in runs]
    return Report(
        [
            Table("Seconds", ["", "first step", *PARTS, MEMORY], rows),
            Table("Seconds without and with XLA", ["", "first step", *PARTS], with_xla),
        ],
        [
            Bar("ddl's first step minus Keras's, s", spread(ours - theirs), 1.0, "at most"),
            Bar(
                "ddl's peak memory / Keras's",
                spread(memory["ddl"] / memory["Keras"]),
                1.1,
                "at most",
            ),
        ],
        [Plot("Time to the first step", "", "s", parts)],
    )


def _measured(
    commands: Mapping[str, Sequence[str]], cache: Path, rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, list[dict[str, float]]]]:
    """Returns the first steps of commands, and the results of `one_run`; interleaved."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}

    def run(name: str) -> float:
        runs[name].append(one_run(commands[name], cache))
        return runs[name][-1]["first step"]

    return interleaved({name: lambda name=name: run(name) for name in commands}, rounds), runs


def _of(runs: Sequence[dict[str, float]], part: str, missing: float | str = "–"):  # type: ignore[no-untyped-def]
    values = [run[part] for run in runs if part in run]
    return spread(values) if values else missing


if __name__ == "__main__":
    command.main(measure)
