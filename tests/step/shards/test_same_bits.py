"""With `batch_shards`, runs on other devices end with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from ddl.errors import ConfigError
from tests.processes import forked
from tests.run.whole_runs import ROOT, SMALL
from tests.step.shards import same_bits_run, sweep_of_layers
from tests.step.shards.same_bits_run import SHARDS

STEPS = 60  # of the runs that are killed
_ONE_CORE = {min(os.sched_getaffinity(0))}


def outcome(*arguments: str, **options) -> str:
    """Returns what the run prints: digest and loss."""
    run = forked.run(
        [sys.executable, "-m", "tests.step.shards.same_bits_run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def outcomes(case: str, places: list[tuple[str, str]], precision: str = "float32") -> set[str]:
    return {outcome(case, *place, precision) for place in places}


def pinned() -> None:
    os.sched_setaffinity(0, _ONE_CORE)


def test_a_perceptron_learns_the_same_bits_on_any_devices():
    places = [("mirrored", "2"), ("mirrored", "4"), ("central_storage", "2")]
    found = outcomes("mlp", places)
    found.add(outcome("mlp", "one_device", "1", preexec_fn=pinned))
    assert len(found) == 1


@pytest.mark.slow
def test_all_that_depends_on_rows_learns_the_same_bits_on_any_devices():
    """Convolutions, augmentation, dropout, synchronized normalization, accumulation, average."""
    places = [("one_device", "1"), ("mirrored", "2"), ("mirrored", "4"), ("central_storage", "2")]
    assert len(outcomes("regularized", places)) == 1


@pytest.mark.slow
def test_bfloat16_learns_the_same_bits_on_any_devices():
    places = [("one_device", "1"), ("mirrored", "2")]
    assert len(outcomes("regularized", places, "mixed_bfloat16")) == 1


def started(
    folder, steps: int, *arguments: str, of: tuple[str, ...] = ("ddl.main",)
) -> subprocess.Popen:
    config = {
        "Trainer.batch_shards": SHARDS,
        "TRAIN_STEPS": steps,
        "CHECKPOINT_EVERY": 2,
        "EVAL_EVERY": 4,
        "Retention.last": STEPS,
    }
    params = [*(f"{name} = {value}" for name, value in config.items()), *SMALL]
    flags = [f"--gin_param={param}" for param in params]
    gin = "--gin_file=configs/digits_cnn_regularized.gin"
    program = [sys.executable, "-m", *of, gin, *flags, f"--model_dir={folder}", *arguments]
    return subprocess.Popen(
        program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def ddl_main(folder, steps: int, *arguments: str, of: tuple[str, ...] = ("ddl.main",)) -> None:
    process = started(folder, steps, *arguments, of=of)
    _, output = process.communicate()
    assert process.returncode == 0, output


def killed(folder, after: int, *arguments: str) -> None:
    """Trains, and kills the process at some moment after a step."""
    process = started(folder, STEPS, *arguments)
    try:
        while process.poll() is None and not list(folder.glob(f"checkpoints/step-{after}.index")):
            time.sleep(0.001)
    finally:
        process.kill()
        _, output = process.communicate()
    assert process.returncode == -signal.SIGKILL, output


def digests(folder) -> dict[str, str]:
    files = (folder / "checkpoints").glob("step-*.json")
    return {file.stem: json.loads(file.read_text())["sha256"] for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_a_run_that_is_killed_and_moved_has_the_digests_of_one_device(tmp_path, precision):
    """The float32 run begins on two workers."""
    same = f"--gin_param=PRECISION = '{precision}'"
    ddl_main(tmp_path / "one", STEPS, same)
    moved = tmp_path / "moved"
    if precision == "float32":
        of = ("ddl.launch", "--num_workers=2", "--")
        ddl_main(moved, 2, "--num_virtual_devices=2", same, of=of)
    after = 2 * random.Random(precision).randint(2, 10)
    killed(moved, after, "--strategy=mirrored", "--num_virtual_devices=4", same)
    ddl_main(moved, STEPS, "--strategy=mirrored", "--num_virtual_devices=2", same)
    expected, found = digests(tmp_path / "one"), digests(moved)
    assert len(set(expected.values())) == STEPS // 2
    assert found == expected


@pytest.mark.slow
def test_each_layer_learns_the_same_bits_on_any_devices():
    program = [sys.executable, "-m", "tests.step.shards.sweep_of_layers"]
    run = forked.run(program, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    equal = json.loads(run.stdout.splitlines()[-1])
    assert equal.keys() == sweep_of_layers.CASES.keys()
    assert all(equal.values()), equal


def test_without_one_thread_for_each_kernel_the_trainer_refuses():
    # This process has started TensorFlow with as many threads as there are cores.
    if os.environ.get("TF_NUM_INTRAOP_THREADS") == "1":
        pytest.skip("has one thread")
    with pytest.raises(ConfigError, match="same_bits=True"):
        same_bits_run.trainer("mlp", "one_device", 1)
