"""The commands ddl replay and ddl bisect, with processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes import forked

ROOT = Path(__file__).parents[2]
FAULTY = ROOT / "tests" / "bisect" / "faulty"


def command(module, *arguments, code=None):
    paths = [str(ROOT), *([] if code is None else [str(code)])]
    return forked.run(
        [sys.executable, "-m", f"ddl.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def listing(path):
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.rglob("*")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one config; the code of the second one changes a slot in step 11."""
    folder = tmp_path_factory.mktemp("runs")
    text = FAULTY.with_suffix(".py").read_text()
    changed = text.replace('if self.fault == "slot changed" or (', "if True or (")
    changed = changed.replace(
        "tf.int64), self.at - 1)\n        slot", "tf.int64), 10)\n        slot"
    )
    assert text.count("self.at - 1") == changed.count("self.at - 1") + 1
    gin = folder / "own.gin"
    gin.write_text(FAULTY.with_suffix(".gin").read_text().replace("tests.bisect.faulty", "own"))
    for name, code in (("before", text), ("after", changed)):
        (folder / f"code_{name}").mkdir()
        (folder / f"code_{name}" / "own.py").write_text(code)
        done = command(
            "main",
            f"--gin_file={gin}",
            f"--model_dir={folder / name}",
            *("--mode=train", "--strategy=mirrored", "--num_virtual_devices=2"),
            code=folder / f"code_{name}",
        )
        assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.slow
def test_a_step_is_replayed_and_saved(runs, tmp_path):
    before, code = listing(runs / "before"), f"--code={runs / 'code_before'}"
    file = tmp_path / "step.npz"
    done = command(
        *("replay", runs / "before", "--step=10", "--verify", code, f"--output={file}"),
        "--show=indices,examples,update",
    )
    assert done.returncode == 0, done.stdout
    assert "step 10 of 24, computed from checkpoint step-6 on" in done.stdout
    assert "devices: mirrored, 2 CPU devices" in done.stdout
    assert "it ends at the bits of its checkpoint step-12" in done.stdout
    assert listing(runs / "before") == before
    with np.load(file) as arrays:
        index, rows = arrays["indices"], arrays["rows.x"]
        assert "update.weights.sequential.first.kernel" in arrays
    assert rows.shape == (32, 6)
    assert f"{index[5]:>8}" in done.stdout
    done = command("replay", runs / "before", f"--example={index[5]}", code=runs / "code_before")
    assert done.returncode == 0, done.stdout
    assert "step 10, row 5, batch 9" in done.stdout
    # The code of the other run leads elsewhere, and the command says so.
    code = f"--code={runs / 'code_after'}"
    done = command("replay", runs / "before", "--step=12", code, "--show=indices")
    assert done.returncode == 0, done.stdout
    assert "THE REPLAY DOES NOT REPEAT" in done.stdout
    assert listing(runs / "before") == before


@pytest.mark.slow
def test_two_runs_are_bisected_each_with_its_own_code(runs):
    paths = runs / "before", runs / "after"
    before = [listing(path) for path in paths]
    code = [f"--code_{a}={runs / name}" for a, name in (("a", "code_before"), ("b", "code_after"))]
    done = command("bisect", *paths, *code)
    assert done.returncode == 0, done.stdout
    assert "checkpoint step-6: the same\ncheckpoint step-12: " in done.stdout
    assert "The runs differ first in step 11: stage slot, momentum/" in done.stdout
    assert "Replays of both runs: 2." in done.stdout
    assert done.stdout.count("ends at the bits of its checkpoint step-12") == 2
    assert [listing(path) for path in paths] == before
    # With the code of today for both, the difference is gone, and the command says so.
    code = [f"--code_{a}={runs / 'code_before'}" for a in "ab"]
    done = command("bisect", *paths, *code)
    assert done.returncode == 0, done.stdout
    assert "The runs differ first in one of the steps" in done.stdout
    assert "THE REPLAY DOES NOT REPEAT" in done.stdout


@pytest.mark.slow
def test_a_run_with_batch_shards_is_replayed(tmp_path):
    """The operations that record values are no Python code of the user's."""
    done = command(
        *("main", f"--gin_file={FAULTY}.gin", f"--model_dir={tmp_path / 'run'}", "--mode=train"),
        *("--gin_param=Trainer.batch_shards = 4", "--gin_param=TRAIN_STEPS = 6"),
        *("--strategy=mirrored", "--num_virtual_devices=2"),
    )
    assert done.returncode == 0, done.stdout
    done = command("replay", tmp_path / "run", "--step=6")
    assert done.returncode == 0, done.stdout
    assert "it ends at the bits of its checkpoint step-6" in done.stdout
    assert "change the rounding" not in done.stdout
    for words in ("random numbers", "gradients before the reduce", "reduced gradients"):
        assert words in done.stdout


@pytest.mark.slow
def test_errors_of_the_runs_code_name_its_line(runs):
    done = command("replay", runs / "before", "--step=3")
    assert done.returncode == 1, done.stdout
    assert "own" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay"], "takes the directory of one run, got 0"),
        (["replay", "a", "b", "--step=1"], "takes the directory of one run, got 2"),
        (["replay", "a"], "Pass --step, such as --step=120, or --example"),
        (["replay", "a", "--step=1", "--example=2"], "and not both"),
        (["replay", "a", "--step=1", "--show=weights"], "--show must name some of"),
        (["replay", "a", "--step=1", "--output=a.txt"], "must end with .npz"),
        (["replay", "a", "--step=1", "--output=a/b.npz"], "must not lie in"),
        (["replay", "a", "--step=1", "--code=nowhere"], "--code must be a folder"),
        (["replay", "nowhere", "--step=1"], "nowhere does not exist"),
        (["bisect", "a"], "takes the directories of 2 runs, got 1"),
        (["bisect", "nowhere", "nowhere"], "nowhere does not exist"),
        (["bisect", "a", "b", "--code_b=nowhere"], "--code_b must be a folder"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    from ddl.cli import subcommands

    module = subcommands.load(arguments[0])
    try:
        with pytest.raises(SystemExit) as ended:
            module.run([f"ddl {arguments[0]}", *arguments[1:]])
    finally:
        for name in module.FLAGS:
            module.FLAGS[name].unparse()
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_a_link_into_the_run_is_no_place_for_the_output(tmp_path, capsys):
    from ddl.replay import __main__ as replay

    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    output = f"--output={tmp_path / 'link' / 'step.npz'}"
    try:
        with pytest.raises(SystemExit):
            replay.run(["ddl replay", str(tmp_path / "run"), "--step=1", output])
    finally:
        for name in replay.FLAGS:
            replay.FLAGS[name].unparse()
    assert "--output must not lie in the directory of the run" in capsys.readouterr().err
