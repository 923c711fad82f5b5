"""The command ddl sweep: its flags, its checks, and a real sweep that is killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddl.errors import ConfigError
from ddl.launcher.pinning import pin_equally, pin_tasks
from ddl.launcher.tasks import cluster_tasks
from ddl.sweep import __main__ as command
from ddl.sweep.halving import Halving
from ddl.sweep.scheduler import Metric
from ddl.sweep.sweep import Config, Sweep, check_facts
from tests.processes import forked

ROOT = Path(__file__).parents[2]
FACTS = {
    **{"eval": ["loss", "accuracy"], "train": ["loss"], "has_callbacks": False},
    **{"total": 100, "eval_every": 20, "log_every": 50},
}


def sweep_of(metric="accuracy", split="eval", rungs=None):
    halving = Halving(tuple(rungs), 0.5, "max") if rungs else None
    config, axes = Config(["a.gin"]), {"grid": ["SEED = [0]"]}
    return Sweep(
        *(Path("runs/sweep"), config, [{"SEED": "0"}], axes, Metric(metric, split), "max"),
        *(halving, [], 1, "none", 1),
    )


@pytest.mark.parametrize(
    ("given", "facts", "message"),
    [
        ({"metric": "acuracy"}, {}, "(loss, accuracy), got 'acuracy'. Did you mean accuracy?"),
        ({"split": "train"}, {}, "(loss), got 'accuracy'"),
        ({}, {"eval": []}, "there is no data to evaluate on. Bind Trainer.eval_data, or pass"),
        ({"rungs": [20, 100]}, {}, "--rungs must be below the 100 steps of a run, got 100"),
        ({"rungs": [20, 30]}, {}, "multiples of EVAL_EVERY = 20, at which"),
        ({"rungs": [20, 30]}, {"eval_every": None}, "EVAL_EVERY is None. Set EVAL_EVERY = 10."),
        ({"metric": "loss", "split": "train", "rungs": [20]}, {}, "multiples of LOG_EVERY = 50"),
    ],
)
def test_a_metric_or_rung_that_does_not_fit_is_refused(given, facts, message):
    with pytest.raises(ConfigError) as error:
        check_facts(sweep_of(**given), {**FACTS, **facts})
    assert message in str(error.value)


def test_what_fits_passes():
    check_facts(sweep_of(rungs=[20, 80]), FACTS)
    check_facts(sweep_of(metric="loss", split="train", rungs=[50]), FACTS)
    # A callback may report it: this is known only at the end.
    check_facts(sweep_of(metric="mine"), {**FACTS, "has_callbacks": True})


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs the command in this process, which ends before any other is started."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, sweep_dir="--sweep_dir=sweep"):
        monkeypatch.setattr("ddl.sweep.sweep.check", None)
        config = "--gin_file=digits_mlp.gin"
        given = ["ddl sweep", config, *filter(None, [sweep_dir]), *arguments]
        with pytest.raises(SystemExit) as ended:
            command.run(given)
        for name in command.FLAGS:
            command.FLAGS[name].unparse()
        assert ended.value.code == 1
        return capsys.readouterr().err

    return run


GRID = "--grid=SEED = [0, 1]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "A sweep needs at least one binding to vary, got none."),
        (["--grid=SEED = []"], "--grid must have at least one value"),
        ([GRID, "--keep=0.3"], "--keep has no effect without --stop_early"),
        ([GRID, "--stop_early=successive_halving"], "needs --rungs"),
        (
            [GRID, "--stop_early=successive_halving", "--rungs=5,x"],
            "--rungs must be steps, such as 100,300, got 'x'",
        ),
        ([GRID, "--draw_seed=3"], "--draw_seed has no effect without --draw"),
        ([GRID, "--metric=mine"], "--best is required for the metric 'mine'"),
        ([GRID, "--metric=val_loss"], "Write 'loss'."),
        ([GRID, "--at_once=4096"], "--pin=cores needs 4096 cores for --at_once=4096"),
        ([GRID, "--model_dir=x"], "Unknown command line flag 'model_dir'"),
        ([GRID, "--gin_file=nowhere.gin"], "There is no config file nowhere.gin"),
    ],
)
def test_bad_input_is_told_at_once(refused, arguments, message):
    told = refused(*arguments)
    assert message in told
    assert "Traceback" not in told
    assert not Path("sweep").exists()


def test_folders(refused, tmp_path):
    assert "--sweep_dir is required" in refused(GRID, sweep_dir=None)
    assert "must be a path, got an empty text" in refused(GRID, sweep_dir="--sweep_dir=")
    assert "must be a local path, got the URL" in refused(GRID, sweep_dir="--sweep_dir=gs://a")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "mine").touch()
    assert "which has the file sweep.json, but it holds mine" in refused(GRID)


def test_equal_shares_are_those_of_workers():
    tasks = cluster_tasks(1)
    assert pin_equally(1, "cores", "--at_once") == pin_tasks(tasks, "cores")
    assert pin_equally(2, "none", "--at_once") == pin_tasks(cluster_tasks(2), "none")


SWEEP = (
    *("-m", "ddl.sweep", "--gin_file=digits_mlp.gin", "--sweep_dir=sweep"),
    *("--at_once=2", "--pin=none", "--strategy=one_device"),
    *("--gin.TRAIN_STEPS=300", "--gin.EVAL_EVERY=50", "--gin.CHECKPOINT_EVERY=50"),
    *("--gin.LOG_EVERY=50", "--steps_per_loop=10"),
)


def start(folder, *arguments, **options):
    return forked.Popen(
        [sys.executable, *SWEEP, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        **options,
    )


def run(folder, *arguments):
    """Runs a sweep to its end; returns its status, output and errors."""
    with start(folder, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=500)
    assert "Traceback" not in errors, errors
    return process.returncode, output, errors


@pytest.mark.slow
def test_wrong_configs_are_told_before_the_first_run(tmp_path):
    cases = {
        "--grid=FusedSGD.momentom = [0.1]": "has no parameter momentom. Did you mean momentum?",
        "--grid=FusedAdamW.weight_decay = [0.1]": "FusedAdamW.weight_decay is never used",
        # The second value is wrong.
        "--grid=Trainer.clip_norm = [0.9, 'x']": "Trainer.clip_norm must be",
        "--grid=LEARNING_RAT = [0.1]": "LEARNING_RAT is never used. Did you mean LEARNING_RATE?",
    }
    for given, message in cases.items():
        status, _, errors = run(tmp_path, given)
        assert status == 1, errors
        assert message in errors
        assert not (tmp_path / "sweep").exists()
    status, _, errors = run(tmp_path, "--grid=SEED = [0]", "--metric=accuracies", "--best=max")
    assert status == 1
    assert "got 'accuracies'. Did you mean accuracy?" in errors
    status, output, _ = run(tmp_path, "--grid=SEED = [0, 1]", "--dry_run")
    assert (status, output) == (0, "SEED=0\nSEED=1\n")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(tmp_path):
    grid = ["--grid=LEARNING_RATE = [0.01, 0.05]", "--grid=SEED = [0, 1, 2, 3, 4, 5]"]
    runs, logs = tmp_path / "sweep" / "runs", tmp_path / "sweep" / "logs"

    def finished():
        return {path.parents[1].name for path in runs.glob("*/checkpoints/step-300.index")}

    grid.append("--metric=accuracy")
    process = start(tmp_path, *grid)
    patience = time.monotonic() + 400
    # Some have finished, two train, and others wait.
    while len(finished()) < 3 or len(list(runs.glob("*/metrics.jsonl"))) < 5:
        assert process.poll() is None
        assert time.monotonic() < patience
        time.sleep(0.005)
    process.kill()
    process.wait()
    # A run that was just started has a log, but may have no folder yet.
    before, begun = finished(), {path.stem for path in logs.glob("*.log") if path.stat().st_size}
    assert 0 < len(before) < 12
    status, output, errors = run(tmp_path, *grid)
    assert status == 0, errors
    assert f"{len(before)} have ended before" in errors
    assert len(finished()) == 12
    for folder in runs.iterdir():
        log = (logs / f"{folder.name}.log").read_text()
        number = log.count(f"--- {folder.name}, ")
        assert number == 1 + (folder.name in begun - before), log
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows if row["split"] == "eval"]
        assert steps == [50, 100, 150, 200, 250, 300]
    content = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert {one["state"] for one in content["runs"]} == {"finished"}
    assert len(content["settings"]) == 2
    assert content["runs"][0]["name"] == content["best"]
    assert output.splitlines()[0].split() == ["LEARNING_RATE", "SEED", "accuracy", "step", "state"]
    # A changed base is refused, and a further seed is run alone.
    status, _, errors = run(tmp_path, *grid, "--gin.GLOBAL_BATCH_SIZE=32")
    assert status == 1
    assert "GLOBAL_BATCH_SIZE: 64 → 32" in errors
    status, _, errors = run(tmp_path, "--grid=SEED = [0, 1, 2, 3, 4, 5, 6]", grid[0])
    assert status == 0, errors
    assert "14 runs in sweep/runs; the sweep is extended by 2; 12 have ended before." in errors
    assert len(finished()) == 14
