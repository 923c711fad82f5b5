"""The search for settings with Optuna: trials are runs, and a study continues."""

import subprocess
import sys

import optuna
import pytest

from tests.processes import forked
from tests.run.whole_runs import ROOT, lines

SMALL = (
    "TRAIN_STEPS = 20",
    "EVAL_EVERY = 10",
    "CHECKPOINT_EVERY = None",
    "mlp.hidden_units = (8,)",
)


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
    rates = []
    for trial in study.trials:
        run = tmp_path / f"trial-{trial.number}"
        found = [line for line in lines(run) if line["split"] == "eval"]
        evaluated = {line["step"]: line["accuracy"] for line in found}
        assert trial.intermediate_values == evaluated
        assert trial.value == evaluated[20]
        rates.append(trial.params["LEARNING_RATE"])
        assert f"LEARNING_RATE = {rates[-1]}" in (run / "config.gin").read_text()
    assert rates[0] != rates[1]
    assert f"Best accuracy {study.best_value:.4f} of trial" in capsys.readouterr().out


def test_a_run_that_fails_ends_the_search(sweep):
    with pytest.raises(RuntimeError, match="Trial 0 ended with status 1"):
        sweep(1, "mlp.no_such_parameter = 1")
