"""With `batch_shards`, runs on other devices end with the same bits."""

import json
import os
import subprocess
import sys

import pytest

from ddl.errors import ConfigError
from tests.processes import forked
from tests.run.whole_runs import ROOT, SMALL
from tests.step.shards import same_bits_run, sweep_of_layers
from tests.step.shards.same_bits_run import SHARDS

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


def sha256(folder, step: int) -> str:
    return json.loads((folder / "checkpoints" / f"step-{step}.json").read_text())["sha256"]


def ddl_main(folder, steps: int, *arguments: str, of: tuple[str, ...] = ("ddl.main",)) -> None:
    config = {
        "Trainer.batch_shards": SHARDS,
        "TRAIN_STEPS": steps,
        "CHECKPOINT_EVERY": 2,
        "EVAL_EVERY": 4,
    }
    params = [*(f"{name} = {value}" for name, value in config.items()), *SMALL]
    flags = [f"--gin_param={param}" for param in params]
    gin = "--gin_file=configs/digits_cnn_regularized.gin"
    program = [sys.executable, "-m", *of, gin, *flags, f"--model_dir={folder}", *arguments]
    subprocess.run(program, cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
def test_workers_and_a_resumed_run_have_the_digest_of_one_device(tmp_path):
    ddl_main(tmp_path / "one", 4)
    expected = [sha256(tmp_path / "one", step) for step in (2, 4)]
    assert expected[0] != expected[1]

    of = ("ddl.launch", "--num_workers=2", "--")
    ddl_main(tmp_path / "workers", 2, "--num_virtual_devices=2", of=of)
    assert sha256(tmp_path / "workers", 2) == expected[0]
    ddl_main(tmp_path / "workers", 4, "--strategy=mirrored", "--num_virtual_devices=2")
    assert sha256(tmp_path / "workers", 4) == expected[1]


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
