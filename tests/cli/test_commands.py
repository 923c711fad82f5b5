"""The frame of the commands: parsing, and the status of each kind of error."""

import os

import pytest
from absl import flags

from ddl import main
from ddl.cli.commands import exiting_on_errors, parse
from ddl.cli.flags import main_flags
from ddl.errors import ConfigError, TrainingDiverged, WorkerLost


class Left(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture(autouse=True)
def without_end_of_the_process(monkeypatch):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)


def parsed(*arguments):
    values = main_flags()
    parse(values, ["ddl", "--gin_file=a", *arguments], "")
    return values


def test_flags_with_several_values_keep_their_order():
    values = parsed("--gin_param=A = 1", "--gin.B=2", "-gin.t/C.d='x=y'", "--gin_bindings=D = 3")
    assert values.gin_param == ["A = 1", "B=2", "t/C.d='x=y'", "D = 3"]
    assert parsed("--gin_file=b", "--gin_file=a").gin_file == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("error", "exit_", "status", "message"),
    [
        (flags.Error("No flag."), SystemExit, 1, "No flag.\nRun the command with --help"),
        (ConfigError("A is wrong."), SystemExit, 1, "A is wrong."),
        (TrainingDiverged("Diverged."), SystemExit, 76, "Diverged."),
        (WorkerLost("Lost."), Left, 77, "Lost."),
        (KeyboardInterrupt(), SystemExit, 130, "Interrupted."),
        (RuntimeError("a\x1b[2J"), Left, 70, r"RuntimeError: a\x1b[2J"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_status(error, exit_, status, message, capsys):
    with pytest.raises(exit_) as raised, exiting_on_errors("ddl"):
        raise error
    assert raised.value.args == (status,)
    shown = capsys.readouterr().err
    assert message in shown
    assert "\x1b" not in shown
    assert ("Traceback" in shown) == (status == 70)


def test_a_parameter_server_leaves_without_the_exit_of_tensorflow(monkeypatch):
    """It takes longer than the launcher waits after the chief."""
    monkeypatch.setattr(main, "build_placement", lambda values: None)
    with pytest.raises(Left, match="0"):
        main.run(["ddl", "--gin_file=a.gin", "--dry_run"])
