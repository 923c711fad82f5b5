"""The frame of the commands: each kind of error has its status, in each command."""

import os

import pytest

from ddl import check, main, output
from ddl.cli.commands import exiting_on_errors
from ddl.errors import ConfigError, TrainingDiverged, WorkerLost


class Left(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture(autouse=True)
def without_end_of_the_process(monkeypatch):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    # What a command sets for its process.
    monkeypatch.setattr(output, "_program", output._program)


@pytest.mark.parametrize(
    ("error", "exit_", "status", "message"),
    [
        (ConfigError("A is wrong."), SystemExit, 1, "A is wrong."),
        (TrainingDiverged("Diverged."), SystemExit, 76, "Diverged."),
        (WorkerLost("Lost."), Left, 77, "Lost."),
        (KeyboardInterrupt(), SystemExit, 130, "Interrupted."),
        (KeyError("a"), Left, 70, "KeyError: 'a'"),
        (RuntimeError("a\x1b[2J"), Left, 70, r"RuntimeError: a\x1b[2J"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_status(error, exit_, status, message, capsys):
    with pytest.raises(exit_) as raised, exiting_on_errors():
        raise error
    assert raised.value.args == (status,)
    shown = capsys.readouterr().err
    assert message in shown
    assert "\x1b" not in shown
    assert ("Traceback" in shown) == (status == 70)


def test_a_report_of_a_check_has_no_control_sequences(monkeypatch, capsys):
    class Report:
        same = True

        def __str__(self):
            return "Task\x1b[2J computes the same everywhere."

    monkeypatch.setattr("ddl.checking.check_config", lambda *_: Report())
    try:
        with pytest.raises(SystemExit) as raised:
            check.run(["check", "--gin_file=x.gin"])
    finally:
        check.FLAGS["gin_file"].unparse()
    assert raised.value.code == 0
    assert capsys.readouterr().out == "Task\\x1b[2J computes the same everywhere.\n"


@pytest.mark.parametrize(
    ("command", "does", "flags"),
    [
        (main, "ddl.main.start", ["--dry_run"]),
        (check, "ddl.checking.check_config", []),
    ],
    ids=["ddl", "ddl check"],
)
def test_an_interrupted_command_shows_no_traceback(command, does, flags, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(does, interrupted)
    try:
        with pytest.raises(SystemExit) as raised:
            command.run(["command", "--gin_file=x.gin", *flags])
    finally:
        for name in ("gin_file", "dry_run"):
            main.FLAGS[name].unparse()
    assert raised.value.code == 130
    shown = capsys.readouterr().err
    assert "Interrupted." in shown
    assert "Traceback" not in shown
