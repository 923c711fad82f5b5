"""Whole runs of the sanity modes, as processes of their own."""

import json
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest

from ddl.errors import ConfigError, ModelDirectoryError
from ddl.run.directory import MARK
from ddl.run.sanity import fast_run, modes
from tests.processes import forked

ROOT = Path(__file__).parents[3]
SMALL = ("TRAIN_STEPS = 120", "mlp.hidden_units = (32,)", "RunPlan.callbacks = []")


def ddl(model_dir, *arguments, params=()):
    command = [
        *(sys.executable, "-m", "ddl.main", f"--gin_file={ROOT}/configs/digits_mlp.gin"),
        *(f"--gin_param={param}" for param in (*SMALL, *params)),
        *(f"--model_dir={model_dir}", *arguments),
    ]
    return forked.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sanity")


@pytest.fixture(scope="module")
def overfitted(folder):
    """One batch on two replicas, without the smoothing that keeps the loss above zero."""
    return ddl(
        folder / "a",
        *("--overfit_batch", "--num_virtual_devices=2", "--strategy=mirrored"),
        params=["Classification.label_smoothing = 0.0", "TRAIN_STEPS = 300"],
    )


@pytest.fixture(scope="module")
def fast(folder):
    return ddl(folder / "b", "--fast_run")


def lines(path, split):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


def test_one_batch_is_learned(folder, overfitted):
    assert overfitted.returncode == 0, overfitted.stdout + overfitted.stderr
    path = folder / "a-overfit_batch"
    assert "--overfit_batch: NOT A REAL RUN, each batch is the first one" in overfitted.stdout
    assert "near zero" in overfitted.stdout
    assert "not near zero" not in overfitted.stdout
    assert not (folder / "a").exists()
    assert (path / MARK).read_text().startswith("overfit_batch\n")
    (evaluated,) = lines(path, "eval")
    assert evaluated["accuracy"] == 1.0  # of the batch it was trained on
    trained = lines(path, "train")
    assert trained[-1]["epoch"] == pytest.approx(300 / 23, abs=1e-6)  # epochs are the run's
    assert "label_smoothing = 0.0" in (path / "config.gin").read_text()


def test_a_second_call_begins_anew_and_says_what_to_look_at(folder, overfitted):
    again = ddl(folder / "a-overfit_batch", "--overfit_batch", params=["LEARNING_RATE = 0.001"])
    assert again.returncode == 0, again.stdout + again.stderr
    assert "not near zero" in again.stdout
    assert "label smoothing" in again.stdout
    steps = [row["step"] for row in lines(folder / "a-overfit_batch", "train")]
    assert steps == sorted(set(steps))


def test_a_fast_run_does_each_part_once(folder, fast):
    assert fast.returncode == 0, fast.stdout + fast.stderr
    path = folder / "b-fast_run"
    assert "trained 2 updates, evaluated, saved, restored" in fast.stdout.replace("\n", " ")
    assert [row["step"] for row in lines(path, "train")] == [1, 2]
    assert [row["step"] for row in lines(path, "eval")] == [1, 2]
    assert {p.name for p in (path / "checkpoints").glob("*.index")} >= {"step-2.index"}
    assert any((path / "export").iterdir())
    assert not (folder / "b").exists()


def test_a_real_run_in_its_directory_is_refused(folder, fast):
    before = (folder / "b-fast_run" / "metrics.jsonl").read_bytes()
    result = ddl(folder / "b-fast_run")
    assert result.returncode == 1
    assert "was written by --fast_run, which is no real run" in result.stderr.replace("\n", " ")
    assert (folder / "b-fast_run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--overfit_batch", "--fast_run"], "--overfit_batch and --fast_run exclude each other"),
        (["--fast_run", "--dry_run"], "--fast_run has no effect with --dry_run"),
        (["--overfit_batch", "--mode=eval"], "--overfit_batch has no effect with --mode=eval"),
    ],
)
def test_flags_that_exclude_each_other(folder, flags, message):
    result = ddl(folder / "c", *flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert not (folder / "c").exists()


def test_a_variable_that_is_not_restored_is_named(monkeypatch):
    kept, lost = keras.Variable([1.0], name="kept"), keras.Variable([np.nan], name="lost")
    monkeypatch.setattr(fast_run, "_variables", lambda _: [kept, lost])

    class Trainer:
        step = 2

    class Checkpoints:
        def restore_latest(self):
            kept.assign([1.0])

    with pytest.raises(ModelDirectoryError, match="other values of lost. Keep the layers"):
        fast_run.check_restoring(Trainer(), Checkpoints())

    lost.assign([np.nan])
    monkeypatch.setattr(
        Checkpoints, "restore_latest", lambda _: (kept.assign([1.0]), lost.assign([np.nan]))
    )
    assert fast_run.check_restoring(Trainer(), Checkpoints()) == 2


def test_several_processes_are_refused(monkeypatch):
    traits = types.SimpleNamespace(several_processes=True)
    monkeypatch.setattr(modes, "traits_of", lambda _: traits)
    with pytest.raises(ConfigError, match="--fast_run must run in one process, got object"):
        modes.check_one_process("fast_run", object())
