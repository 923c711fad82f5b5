"""The search for settings with Optuna: trials are runs, and a study continues."""

import subprocess
import sys

import optuna
import pytest

from tests.processes import forked
from tests.run.whole_runs import ROOT, lines

pytestmark = pytest.mark.processes

SMALL = ("TRAIN_STEPS = 20", "EVAL_EVERY = 10", "CHECKPOINT_EVERY = None", "mlp.hidden_units = [8]")


def lines_of(study):
    """Returns the lines of the first trial's metrics so far."""
    file = study / "trial-0" / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Makes trials, whose processes are forked with TensorFlow imported already."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    import sweep_optuna

    def make(trials, *params):
        given = [f"--gin_param={param}" for param in (*SMALL, *params)]
        file = f"--gin_file={ROOT}/configs/digits_mlp.gin"
        flags = [file, f"--study={tmp_path}", f"--trials={trials}", *given]
        monkeypatch.setattr(sys, "argv", ["sweep_optuna.py", *flags])
        sweep_optuna.main()
        return optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/study.db")

    return make


def test_each_trial_is_a_run_with_its_own_values(sweep, tmp_path, capsys):
    sweep(1)
    study = sweep(1)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    for trial in study.trials:
        run = tmp_path / f"trial-{trial.number}"
        evaluated = [line for line in lines(run) if line["split"] == "eval"]
        assert [line["step"] for line in evaluated] == [10, 20]
        assert trial.value == evaluated[-1]["accuracy"]
        assert (
            f"LEARNING_RATE = {trial.params['LEARNING_RATE']}" in (run / "config.gin").read_text()
        )
    assert study.trials[0].params != study.trials[1].params
    assert f"Best accuracy: {study.best_value:.4f}" in capsys.readouterr().out


def test_a_pruned_trial_stops_its_run(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(optuna.Trial, "should_prune", lambda trial: bool(lines_of(tmp_path)))
    with pytest.raises(ValueError, match="Record does not exist"):
        sweep(1, "TRAIN_STEPS = 100_000_000")
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/study.db")
    assert study.trials[0].state.name == "PRUNED"
