"""The command line, as processes of its own."""

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddl import main
from tests.processes import forked

ROOT = Path(__file__).parent.parent
DIGITS = f"--gin_file={ROOT}/configs/digits_cnn.gin"


def ddl(*arguments, cwd=ROOT, imports_tensorflow=True, forks=False, **variables):
    command = [sys.executable, "-m", "ddl.main", *map(str, arguments)]
    if not imports_tensorflow:
        # An import of TensorFlow ends such a process at once, with another status.
        guard = "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None; "
        start = f"from ddl.main import run; run({['ddl', *map(str, arguments)]!r})"
        command = [sys.executable, "-c", guard + start]
    start = forked.run if forks else subprocess.run
    environment = {**os.environ, **variables}
    return start(command, capture_output=True, text=True, cwd=cwd, check=False, env=environment)


def ddl_with(folder, text, *arguments):
    """Runs the digits with a config of the user's, beside a module if there is one."""
    (folder / "mine.gin").write_text(text)
    return ddl(DIGITS, "--gin_file=mine.gin", *arguments, cwd=folder, forks=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gin_fil=a.gin"], "Did you mean: gin_file"),
        ([], "--gin_file is required. Pass a config"),
        ([DIGITS], "--model_dir is required. Pass a directory"),
        ([DIGITS, "--strategy=miror"], "--strategy=miror"),
        ([DIGITS, "--num_virtual_devices=0"], "num_virtual_devices"),
        (
            [DIGITS, "--dry_run", "--gpus=x"],
            "--gpus must be all, none, or numbers such as 0,1, got 'x'",
        ),
        ([DIGITS, "--dry_run", "extra"], "'extra' is not a flag"),
        (["--gin_file=absent.gin", "--dry_run"], "no config file absent.gin"),
        ([DIGITS, "--dry_run", "--gin_param=A = %B"], "%B is not defined. Add a line B = …"),
        ([DIGITS, "--dry_run", "--gin_param=A = %A"], "in a cycle: %A -> %A. Give one"),
        ([DIGITS, "--dry_run", "--gin_param=import nowhere"], "Cannot import nowhere: No module"),
        ([DIGITS, "--dry_run", "--gin_param=LOG_EVRY = 3"], "Did you mean LOG_EVERY?"),
        ([DIGITS, "--model_dir="], "--model_dir must be a path, got an empty text. A variable"),
        (
            [DIGITS, "--model_dir=x", "--mode=eval", "--checkpoint=last"],
            "latest, best, or a step, got 'last'",
        ),
        (
            [DIGITS, "--model_dir=x", "--checkpoint=100"],
            "--checkpoint has no effect with --mode=train_and_eval. Leave",
        ),
        ([DIGITS, "--model_dir=x", "--mode=predict"], "--mode=predict needs --predictions. Pass a"),
        (
            [DIGITS, "--model_dir=x", "--mode=predict", "--predictions=x.csv"],
            "--predictions must end with .jsonl, .npz or .parquet, got x.csv",
        ),
        (
            [DIGITS, "--model_dir=x", "--predictions=x.npz"],
            "--predictions has no effect with --mode=train_and_eval",
        ),
        (
            [DIGITS, "--model_dir=x", "--profile=110:100"],
            "--profile must be two steps, the smaller one first, such as 100:110 for the updates "
            "after step 100 up to step 110, got '110:100'",
        ),
        (
            [DIGITS, "--model_dir=x", "--mode=eval", "--profile=1:2"],
            "--profile has no effect with --mode=eval. Leave it out",
        ),
        ([DIGITS, "--dry_run", "--profile=1:2"], "--profile has no effect with --dry_run"),
        (
            [DIGITS, "--model_dir=x", "--mode=export", "--profile=1:2"],
            "--profile has no effect with --mode=export. Leave it out",
        ),
        (
            [DIGITS, "--model_dir=x", "--mode=export", "--follow_timeout=1"],
            "has no effect with --mode=export. Leave it out",
        ),
        (
            [DIGITS, "--model_dir=x", "--mode=eval", "--checkpoint=best", "--follow_timeout=1"],
            "no effect with --mode=eval and --follow_timeout",
        ),
    ],
    ids=str,
)
def test_bad_flags_and_configs_are_reported_without_tensorflow(arguments, message):
    result = ddl(*arguments, imports_tensorflow=False)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("cluster", ["auto", "tf_config"])
def test_a_wrong_tf_config_is_reported_without_tensorflow(cluster):
    given = [DIGITS, "--dry_run", f"--cluster={cluster}"]
    for addresses in ('"a:1"', '["a:99999999"]', "[1, null]", '["a"]'):
        config = f'{{"cluster": {{"worker": {addresses}}}}}'
        result = ddl(*given, imports_tensorflow=False, TF_CONFIG=config)
        assert result.returncode == 1
        assert "TF_CONFIG must be a JSON object in TensorFlow's form" in result.stderr
        assert len(result.stderr.splitlines()) == 1
    config = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'
    result = ddl(*given, imports_tensorflow=False, TF_CONFIG=config)
    assert "must name this process as one of its workers, got index 1 and 1" in result.stderr


def test_an_error_gives_the_places_of_the_names_that_it_mentions(tmp_path):
    result = ddl_with(tmp_path, "TRAIN_STEPS = -5", "--dry_run")
    assert result.returncode == 1
    assert "RunPlan.train_steps must be greater than 0, got -5" in result.stderr
    assert "  mine.gin:1: TRAIN_STEPS = -5" in result.stderr.splitlines()


class Left(BaseException):
    """Stands in for the end of the process."""


def test_a_parameter_server_leaves_without_the_exit_of_tensorflow(monkeypatch):
    """It takes longer than the launcher waits after the chief."""

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(main, "build_placement", lambda gpus: None)
    monkeypatch.setattr(main.os, "_exit", leave)
    with pytest.raises(Left, match="0"):
        main.start(None, "latest")


def test_sigquit_shows_the_stacks_and_the_command_continues(monkeypatch, capfd):
    done = []

    def start(*_):
        os.kill(os.getpid(), signal.SIGQUIT)
        done.append(True)

    monkeypatch.setattr(main, "start", start)
    try:
        main.run(["ddl", DIGITS, "--dry_run"])
    finally:
        faulthandler.unregister(signal.SIGQUIT)
    assert done
    shown = capfd.readouterr().err
    assert "(most recent call first)" in shown
    assert f'File "{__file__}"' in shown


@pytest.mark.parametrize("command", ["ddl train", "ddl.main", "ddl.launch", "ddl.check"])
def test_an_interrupt_in_the_first_imports_shows_no_traceback(tmp_path, command):
    (tmp_path / "absl.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", *command.split(), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.returncode, result.stderr) == (130, "")
