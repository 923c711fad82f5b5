"""The commands `ddl` and `ddl train`, answered without TensorFlow."""

import faulthandler
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddl import __main__ as command
from ddl import main

ROOT = Path(__file__).parent.parent
DIGITS = f"--gin_file={ROOT}/configs/digits_cnn.gin"
RUN = ("--model_dir=x",)


def run_without_tensorflow(*arguments, cwd=ROOT, **variables):
    """Runs `ddl train`; an import of TensorFlow ends such a process at once with status 70."""
    guard = "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None; "
    start = f"from ddl.__main__ import run; run({['ddl', DIGITS, *map(str, arguments)]!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", guard + start],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env=environment,
    )


def test_a_process_outside_of_its_cluster_is_reported_without_tensorflow():
    config = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'
    wrong = run_without_tensorflow("--dry_run", "--cluster=tf_config", TF_CONFIG=config)
    assert wrong.returncode == 1
    assert (
        "must name this process as one of its tasks, got type 'worker' and index 1" in wrong.stderr
    )


def test_sigquit_shows_the_stacks_and_the_command_continues(monkeypatch, capfd):
    done = []

    def start(_):
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


@pytest.mark.parametrize(
    ("arguments", "module", "started"),
    [
        (["check", "--gin_file=a.gin"], "ddl.check", ["ddl check", "--gin_file=a.gin"]),
        (["--gin_file=a.gin", "--help"], "ddl.main", ["ddl train", "--gin_file=a.gin", "--help"]),
        (["train", "--dry_run"], "ddl.main", ["ddl train", "--dry_run"]),
        (["launch", "--", "-h"], "ddl.launch", ["ddl launch", "--", "-h"]),
    ],
)
def test_what_starts(arguments, module, started, monkeypatch):
    seen = []
    monkeypatch.setattr(f"{module}.run", seen.append)
    command.run(["ddl", *arguments])
    assert seen == [started]


def test_the_installed_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ddl": "ddl.__main__:run"}
