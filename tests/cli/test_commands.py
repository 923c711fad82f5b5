"""The frame of the commands: parsing and ends; tests/contract has the status of each error."""

import os

import pytest

from ddl import main
from ddl.cli.commands import exiting_on_errors, parse
from ddl.cli.flags import main_flags


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


def test_a_traceback_has_no_control_characters(capsys):
    with pytest.raises(Left, match="70"), exiting_on_errors("ddl"):
        raise RuntimeError("a\x1b[2J")
    assert r"RuntimeError: a\x1b[2J" in capsys.readouterr().err


def test_a_parameter_server_leaves_without_the_exit_of_tensorflow(monkeypatch):
    """It takes longer than the launcher waits after the chief."""
    monkeypatch.setattr(main, "build_placement", lambda values: None)
    with pytest.raises(Left, match="0"):
        main.run(["ddl", "--gin_file=a.gin", "--dry_run"])
