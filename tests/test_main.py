"""The command `ddl`, and what it starts."""

import faulthandler
import os
import signal
from pathlib import Path

import pytest

from ddl import __main__ as command
from ddl import main

ROOT = Path(__file__).parent.parent
DIGITS = f"--gin_file={ROOT}/configs/digits_cnn.gin"


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
