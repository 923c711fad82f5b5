"""Runs of `ddl.main` in separate processes, and the comparison of their results."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from ddl.figures import is_measured
from tests.processes import forked

ROOT = Path(__file__).parents[2]
# A network that is traced soon, with all features of its config.
SMALL = ("cnn.blocks = ((8,),)", "cnn.hidden_units = (16,)")
PLAN = (
    *SMALL,
    *("TRAIN_STEPS = 240", "EVAL_EVERY = 40", "CHECKPOINT_EVERY = 15", "LOG_EVERY = 10"),
    "Retention.best_metric = 'accuracy'",
)
MODES = {
    "float32 one_device": ("float32", ["--strategy=one_device"]),
    "mixed_float16 mirrored": ("mixed_float16", ["--strategy=mirrored", "--num_virtual_devices=2"]),
    "float32 mirrored, sharded": (
        "float32",
        ["--strategy=mirrored", "--num_virtual_devices=2", "--shard_optimizer_state"],
    ),
}


def command(model_dir, precision, flags, *params):
    return [
        sys.executable,
        "-m",
        "ddl.main",
        f"--gin_file={ROOT}/configs/digits_cnn_regularized.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*PLAN, f"PRECISION = '{precision}'", *params)),
        *flags,
    ]


def start(*arguments):
    return forked.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process, timeout=600):
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def tensors(model_dir) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def lines(model_dir):
    found = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name != "examples_per_second" and not is_measured(name)
        }
        for line in found
    ]


def assert_same_end(model_dir, reference):
    ours, theirs = tensors(model_dir), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(model_dir) == lines(reference)
    steps = [(line["step"], line["split"]) for line in lines(model_dir)]
    assert len(set(steps)) == len(steps)
    assert {step for step, split in steps if split == "train"} == set(range(10, 250, 10))
    assert {step for step, split in steps if split == "eval"} == set(range(40, 250, 40))
    assert not list((model_dir / "checkpoints").glob("*.partial"))


class StraightRuns:
    """A cache of each mode's uninterrupted run and its start-up time in seconds."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[str, tuple[Path, float]] = {}

    def __call__(self, mode: str) -> tuple[Path, float]:
        if mode not in self._made:
            model_dir = self._folder / mode
            began = time.monotonic()
            process = start(model_dir, *MODES[mode])
            while process.poll() is None and not (model_dir / "metrics.jsonl").exists():
                time.sleep(0.01)
            start_up = time.monotonic() - began
            status, output = finish(process)
            assert status == 0, output
            self._made[mode] = model_dir, start_up
        return self._made[mode]
