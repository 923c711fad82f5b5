"""What `--fit_memory` sets, suggests and refuses; trials are replaced but in the last tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddl.cli.fitting import microbatch
from ddl.errors import ConfigError
from tests.processes import forked

ROOT = Path(__file__).parents[3]
FACTS = {"sizes": {"": 64}, "configured": 1, "depends_on": [], "evaluates": True}


@pytest.fixture
def flags(monkeypatch):
    """Parsed flags of a run without a directory."""
    values = microbatch.FLAGS
    values.mark_as_parsed()
    for name, value in (("gin_param", ["SEED = 1"]), ("model_dir", None), ("cluster", "none")):
        monkeypatch.setattr(values[name], "_value", value)
    return values


def replace_trial(monkeypatch, smallest, **facts):
    """Replaces the trials: `smallest` microbatches fit, and more. Returns the numbers tried."""
    tried = []

    def trial(number, path):
        tried.append(number)
        return {"of_run": {**FACTS, **facts}, "fits": number >= smallest}

    monkeypatch.setattr(microbatch, "_trial", trial)
    return tried


def test_the_number_is_bound_last(flags, monkeypatch, capsys):
    assert replace_trial(monkeypatch, 4) == []
    microbatch.fit_memory()
    assert flags.gin_param == ["SEED = 1", "ACCUMULATION_STEPS = 4"]
    output = capsys.readouterr().out
    assert "ACCUMULATION_STEPS = 2, microbatches of 32 per replica: does not fit" in output
    assert "ACCUMULATION_STEPS = 4, instead of 1 of the config. Evaluations take whole" in output


def test_a_batch_that_fits_takes_one_trial(flags, monkeypatch, capsys):
    tried = replace_trial(monkeypatch, 1, configured=8)
    microbatch.fit_memory()
    assert tried == [1]
    assert flags.gin_param[-1] == "ACCUMULATION_STEPS = 1"
    assert "ACCUMULATION_STEPS = 1, instead of 8 of the config.\n" in capsys.readouterr().out


def test_each_source_divides(flags, monkeypatch):
    tried = replace_trial(monkeypatch, 5, sizes={"a": 24, "b": 60})
    microbatch.fit_memory()
    assert flags.gin_param[-1] == "ACCUMULATION_STEPS = 6"
    assert all(24 % number == 0 and 60 % number == 0 for number in tried)


def test_a_result_that_would_change_is_only_suggested(flags, monkeypatch, capsys):
    replace_trial(monkeypatch, 2, configured=4, depends_on=["bn_1"])
    microbatch.fit_memory()
    assert flags.gin_param[-1] == "ACCUMULATION_STEPS = 4"
    output = capsys.readouterr().out
    assert "(bn_1), so --fit_memory changes nothing: ACCUMULATION_STEPS = 4" in output
    assert "ACCUMULATION_STEPS = 2 would fit too" in output


def test_a_result_that_would_change_is_refused_if_it_does_not_fit(flags, monkeypatch):
    replace_trial(monkeypatch, 8, configured=4, depends_on=["bn_1"])
    with pytest.raises(ConfigError, match="does not fit into memory, and 8 would. Pass --gin_par"):
        microbatch.fit_memory()
    assert flags.gin_param == ["SEED = 1"]


def test_nothing_fits(flags, monkeypatch):
    replace_trial(monkeypatch, 65)
    with pytest.raises(ConfigError, match="Not even 64 microbatches per replica fit"):
        microbatch.fit_memory()


def test_a_model_that_does_not_fit(flags, monkeypatch):
    monkeypatch.setattr(microbatch, "_trial", lambda number, path: {"fits": False})
    with pytest.raises(ConfigError, match="do not fit into memory, before the first update"):
        microbatch.fit_memory()


def test_several_processes_are_refused(flags, monkeypatch):
    monkeypatch.setattr(flags["cluster"], "_value", "tf_config")
    hosts = {"worker": ["a:1", "b:1"]}
    config = {"cluster": hosts, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ConfigError, match="must run in one process, got a cluster of 2 workers"):
        microbatch.fit_memory()


def test_a_resumed_run_keeps_its_number(flags, monkeypatch, tmp_path, capsys):
    tried = replace_trial(monkeypatch, 2)
    monkeypatch.setattr(flags["model_dir"], "_value", str(tmp_path))
    (tmp_path / "config.gin").write_text("SEED = 1\nACCUMULATION_STEPS = 16\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-0.index").touch()
    microbatch.fit_memory()  # it has not trained: it may have run out of memory
    assert flags.gin_param[-1] == "ACCUMULATION_STEPS = 2"
    (tmp_path / "checkpoints/step-10.index").touch()
    tried.clear()
    microbatch.fit_memory()
    assert flags.gin_param[-1] == "ACCUMULATION_STEPS = 16"
    assert not tried
    assert "with which the run was trained so far" in capsys.readouterr().out


# An example takes about 2.5 MB.
WIDE = ("GLOBAL_BATCH_SIZE = 1024", "mlp.hidden_units = (300000,)", "RunPlan.callbacks = []")


def run(*arguments, params=WIDE):
    command = [
        *(sys.executable, "-m", "ddl.main", f"--gin_file={ROOT}/configs/digits_mlp.gin"),
        *(f"--gin_param={param}" for param in (*params, "TRAIN_STEPS = 2", "EVAL_EVERY = None")),
        *("--fit_memory", *arguments),
    ]
    return forked.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_limit_on_cpus(tmp_path):
    """The limit lies between the memory of one and of two microbatches."""
    result = run("--memory_limit=2600", f"--model_dir={tmp_path}/run")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "= 1, microbatches of 1,024 per replica: does not fit into memory." in result.stdout
    found = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert found["step"] == 2
    text = (tmp_path / "run/config.gin").read_text()
    assert {"ACCUMULATION_STEPS = 2", "ACCUMULATION_STEPS = 4"} & {*text.splitlines()}, text


def test_cpus_need_a_limit(tmp_path):
    result = run(f"--model_dir={tmp_path}/run", params=())
    assert result.returncode == 1
    assert "--fit_memory on CPUs needs --memory_limit" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_second_name_of_a_flag_is_not_passed_on(flags, monkeypatch, tmp_path):
    """The first one has its values."""
    passed = []
    done = subprocess.CompletedProcess([], 1, "", "")
    monkeypatch.setattr(subprocess, "run", lambda program, **_: passed.append(program) or done)
    monkeypatch.setattr(flags["gin_param"], "present", 1)
    with pytest.raises(SystemExit):
        microbatch._trial(2, tmp_path / "facts.json")
    assert [x for x in passed[0] if "SEED = 1" in str(x)] == ["--gin_param=SEED = 1"]
