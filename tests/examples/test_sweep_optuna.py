"""The search for settings with Optuna: trials are runs, and a study continues."""

import subprocess
import sys

import optuna
import pytest

from tests.processes import forked
from tests.run.whole_runs import ROOT, lines

pytestmark = pytest.mark.processes

SMALL = ("TRAIN_STEPS = 20", "EVAL_EVERY = 10", "CHECKPOINT_EVERY = None", "mlp.hidden_units = [8]")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Makes a trial, whose process is forked with TensorFlow imported already."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    import sweep_optuna

    def make(*params):
        given = [f"--gin_param={param}" for param in (*SMALL, *params)]
        file = f"--gin_file={ROOT}/configs/digits_mlp.gin"
        flags = [file, f"--study={tmp_path}", "--trials=1", *given]
        monkeypatch.setattr(sys, "argv", ["sweep_optuna.py", *flags])
        sweep_optuna.main()
        return optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/study.db")

    return make


def test_each_trial_is_a_run_with_its_own_values_and_a_pruned_one_stops(
    sweep, tmp_path, monkeypatch, capsys
):
    sweep()
    begun = (tmp_path / "trial-1" / "metrics.jsonl").exists
    monkeypatch.setattr(optuna.Trial, "should_prune", lambda trial: begun())
    study = sweep("TRAIN_STEPS = 100_000_000")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    for trial in study.trials:
        config = (tmp_path / f"trial-{trial.number}" / "config.gin").read_text()
        assert f"LEARNING_RATE = {trial.params['LEARNING_RATE']}" in config
    assert study.trials[0].params != study.trials[1].params
    evaluated = [line for line in lines(tmp_path / "trial-0") if line["split"] == "eval"]
    assert [line["step"] for line in evaluated] == [10, 20]
    assert study.trials[0].value == evaluated[-1]["accuracy"]
    assert f"Best accuracy: {study.best_value:.4f}" in capsys.readouterr().out
