"""The command line of the launcher."""

import os
import subprocess
import sys

import pytest

from tests.launcher.programs import ROOT

# An import of TensorFlow fails, and what would be started is printed.
COMMAND = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
from ddl import launch
class Shown:
    def __init__(self, command, *arguments, **options):
        print(command[1:], arguments, options)
    def run(self):
        return 77
if len(sys.argv) > 1 and sys.argv[1] == "show":
    del sys.argv[1]
    launch.Cluster = Shown
launch.run(["ddl-launch", *sys.argv[1:]])
"""


def ddl_launch(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )


GIN = "--gin_file=a.gin"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "The flags of ddl.main are missing"),
        (["--num_workers=2", GIN], "flags of ddl.main are missing"),
        (["--num_workers=2", "--"], "flags of ddl.main are missing"),
        (["--", GIN], "--num_workers is required. Pass a number"),
        (["--num_ps=1", "--", GIN], "--num_workers is required with --num_ps=1"),
        (["--num_workers=0", "--", GIN], "--num_workers=0"),
        (["--num_workers=two", "--", GIN], "--num_workers=two"),
        (["--num_workers=2", "--num_ps=-1", "--", GIN], "--num_ps=-1"),
        (["--num_workers=2", "--max_restarts=-1", "--", GIN], "--max_restarts=-1"),
        (["--num_workers=2", "--grace_seconds=-1", "--", GIN], "--grace_seconds=-1"),
        (["--num_worker=2", "--", GIN], "'num_worker'. Did you mean: num_workers"),
        (["2", "--", GIN], "'2' is not a flag"),
        (["--num_workers=2", "--", "a.gin"], "'a.gin' is not a flag"),
        (["--num_workers=2", "--", GIN, "a.gin"], "'a.gin' is not a flag"),
        (["--num_workers=2", "--", "--gin_fil=a.gin"], "'gin_fil'. Did you mean: gin_file"),
        (["--num_workers=2", "--", GIN, "--strategy=miror"], "--strategy=miror"),
        (["--num_workers=2", "--pin=core", "--", GIN], "--pin=core"),
        (["--num_workers=9999", "--pin=cores", "--", GIN], "needs 9999 cores"),
        (["--num_workers=2", "--pin=gpus", "--", GIN], "needs 2 GPUs for --num_workers=2, got 0"),
    ],
    ids=str,
)
def test_bad_input_is_two_lines_and_status_1(arguments, message, tmp_path):
    result = ddl_launch(*arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--num_workers=2", "--help"], ["-h"]], ids=str)
def test_help_says_flags_and_statuses(arguments):
    result = ddl_launch(*arguments)
    assert result.returncode == 0
    for flag in ("num_workers", "num_ps", "max_restarts", "grace_seconds", "pin", "log_dir"):
        assert f"--{flag}" in result.stdout
    assert "--[no]live" in result.stdout
    for status in ("0 Done", "128 + N A", "76 Training diverged", "77 A", "75 Training stopped"):
        assert status in " ".join(result.stdout.split())


def shown(*arguments):
    result = ddl_launch("show", *arguments)
    assert result.returncode == 77, result.stderr  # what the cluster returned
    assert result.stderr == ""
    return result.stdout


def test_the_strategy_is_chosen_unless_it_is_given():
    assert shown("--num_workers=2", "--", GIN) == (
        "['-m', 'ddl.main', '--gin_file=a.gin', '--strategy=multi_worker_mirrored'] (2, 0) "
        "{'max_restarts': 0, 'grace_seconds': 5.0, 'pin': 'none', 'log_dir': None, 'live': False}\n"
    )
    with_servers = shown("--num_workers=2", "--num_ps=3", "--", GIN)
    assert "'--gin_file=a.gin', '--strategy=parameter_server'] (2, 3)" in with_servers
    assert "--strategy" not in shown("--num_workers=1", "--", GIN)  # one process: its devices'
    for given in (["--strategy=mirrored"], ["-strategy", "mirrored"]):
        assert shown("--num_workers=2", "--", GIN, *given).startswith(
            str(["-m", "ddl.main", GIN, *given])
        )


def test_flags_of_ddl_main_are_passed_on_as_they_are():
    given = [GIN, "--gin.TRAIN_STEPS=3", "--gin_param=train/A.b = 'x y'", "--nodry_run"]
    assert str(given)[1:-1] in shown("--num_workers=2", "--", *given)


def test_flags_reach_the_cluster():
    own = ["--max_restarts=3", "--grace_seconds=0.5", "--pin=cores", "--log_dir=x/y", "--live"]
    assert (
        "{'max_restarts': 3, 'grace_seconds': 0.5, 'pin': 'cores', 'log_dir': 'x/y', 'live': True}"
        in shown("--num_workers=1", *own, "--", GIN)
    )


@pytest.mark.parametrize(
    ("given", "log_dir"),
    [
        (["--model_dir=runs/a"], "PosixPath('runs/a/logs')"),
        (["--model_dir", "runs/a"], "PosixPath('runs/a/logs')"),
        (["--model_dir=runs/a", "--dry_run"], "None"),  # which writes nothing there
        (["--model_dir=gs://runs/a"], "None"),
    ],
    ids=str,
)
def test_logs_lie_in_the_model_dir(given, log_dir):
    assert f"'log_dir': {log_dir}" in shown("--num_workers=2", "--", GIN, *given)


def test_too_few_files_for_the_ports():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    command = [sys.executable, "-c", limit + COMMAND, "--num_workers=100", "--", GIN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert "find 100 free ports: Too many open files. Start fewer" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unexpected_error_is_not_one_to_correct():
    program = COMMAND.replace("return 77", "raise KeyError('a')")
    command = [sys.executable, "-c", program, "show", "--num_workers=2", "--", GIN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 70
    assert "KeyError: 'a'" in result.stderr
