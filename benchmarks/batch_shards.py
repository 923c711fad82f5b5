"""The same bits on any devices, and their cost: python -m benchmarks.batch_shards.

Whole runs of `ddl.main` with `Trainer.batch_shards = 8`, each in a process of its own, on 1, 2, 4
and 8 virtual devices, with central storage, on two workers of one and of two devices, and on one
pinned core. The first table shows the digest of the last checkpoint of each.

The second table shows the time of an update on one device over that of the same run without
shards: of the last half of the updates, in runs by turns.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import command, repeats
from benchmarks.report import Bar, Report, Table

LIMIT = 1.15
UPDATES, ROUNDS = 1000, 5
MODELS = {"CNN": "digits_cnn_regularized", "MLP": "digits_mlp"}
PRECISIONS = ("float32", "mixed_bfloat16")
SHARDS = "Trainer.batch_shards = 8"
PLACES: dict[str, tuple[str, ...]] = {
    "one device": ("--strategy=one_device",),
    "one device, one core": ("--strategy=one_device",),
    **{f"{n} devices": ("--strategy=mirrored", f"--num_virtual_devices={n}") for n in (2, 4, 8)},
    "central storage, 2": ("--strategy=central_storage", "--num_virtual_devices=2"),
    "2 workers": (),
    "2 workers of 2 devices": ("--num_virtual_devices=2",),
}


def run(model: str, updates: int, place: str, params: Sequence[str]) -> tuple[str, float]:
    """Trains in a process of its own; returns the digest of the weights and ms per update."""
    half = updates // 2
    plan = [f"TRAIN_STEPS = {updates}", f"CHECKPOINT_EVERY = {updates}", f"LOG_EVERY = {half}"]
    flags = [f"--gin_param={one}" for one in (*plan, f"EVAL_EVERY = {updates}", *params)]
    of = ["ddl.launch", "--num_workers=2", "--"] if "workers" in place else ["ddl.main"]
    with tempfile.TemporaryDirectory() as folder:
        config = f"--gin_file=configs/{MODELS[model]}.gin"
        program = [sys.executable, "-m", *of, config, *flags, *PLACES[place]]
        subprocess.run(
            [*program, f"--model_dir={folder}"],
            check=True,
            capture_output=True,
            preexec_fn=_pin if "one core" in place else None,
        )
        saved = Path(folder) / "checkpoints" / f"step-{updates}.json"
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        last = [x for x in map(json.loads, lines) if x["split"] == "train"][-1]
        return json.loads(saved.read_text())["sha256"], 1e3 * last["time/loop"] / half


def _pin() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def digests(updates: int, places: Sequence[str], precisions: Sequence[str]) -> Table:
    """Returns the first digits of the digest of each run."""
    rows = []
    for model in MODELS:
        for precision in precisions:
            params = (SHARDS, f"PRECISION = '{precision}'")
            found = [run(model, updates, place, params)[0][:12] for place in places]
            equal = "equal" if len(set(found)) == 1 else "DIFFERENT"
            rows.append([f"{model}, {precision}", equal, *found])
    columns = ["", *(row[0] for row in rows)]
    named = zip(["", *places], *(row[1:] for row in rows), strict=True)
    turned = [[place, *found] for place, *found in named]
    return Table(f"SHA-256 after {updates:,} updates", columns, turned)


def cost(updates: int, rounds: int) -> tuple[Table, list[Bar]]:
    """Returns the time with shards over that without, and the targets."""
    rows, bars = [], []
    for model in MODELS:
        contenders: tuple[tuple[str, ...], ...] = ((), (SHARDS,))
        times = [
            [run(model, updates, "one device", given)[1] for given in contenders]
            for _ in range(rounds)
        ]
        pairs = np.array(times)
        ratio = repeats.ratio(pairs[:, 1] / pairs[:, 0])
        rows.append([model, ratio, *map(repeats.spread, pairs.T)])
        if model == "CNN":
            bars.append(Bar("CNN: time with 8 shards / without", ratio, LIMIT, "at most"))
    return Table("Time of an update", ["", "with / without", "without, ms", "with, ms"], rows), bars


def measure(quick: bool) -> Report:
    """Measures both tables."""
    if quick:
        table, bars = cost(4, 1)
        return Report([digests(4, list(PLACES)[:1], PRECISIONS[:1]), table], bars)
    table, bars = cost(UPDATES, ROUNDS)
    return Report([digests(UPDATES, list(PLACES), PRECISIONS), table], bars)


if __name__ == "__main__":
    command.main(measure)
