"""Output of a command on a terminal of a width, and in a pipe."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from ddl.cli.terminal import fitting, wrapped, wrapped_list

COMMAND = [sys.executable, "-m", "ddl", "list", "strategy", "commands"]
ROOT = Path(__file__).parents[2]


def on_terminal(columns: int, **environment: str) -> str:
    """Runs the command on a terminal of so many columns."""
    terminal, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm", **environment}
    subprocess.run(COMMAND, stdout=end, cwd=ROOT, env=environment, check=True)
    os.close(end)
    text = os.read(terminal, 65536).decode()
    os.close(terminal)
    return text.replace("\r\n", "\n")


@pytest.mark.parametrize(("columns", "environment"), [(60, {}), (200, {"NO_COLOR": "1"})])
def test_on_a_terminal(columns, environment):
    text = on_terminal(columns, **environment)
    assert ("\033[1m--strategy\033[0m: auto | one_device" in text) == (not environment)
    assert ("\033" in text) == (not environment)
    plain = text.replace("\033[1m", "").replace("\033[0m", "").partition("train ")[0]
    assert max(map(len, plain.splitlines())) <= columns
    assert plain.count("\n") == (7 if columns == 60 else 4), plain


def test_in_a_pipe_whose_reader_ends_first():
    with subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        errors = process.stderr.read() if process.stderr else b""
    assert process.returncode == 0
    assert errors == b""


def test_wrapping():
    assert wrapped("a bc\033 d", 6, "> ", "  ") == ["> a", "  bc\\x1b", "  d"]
    assert wrapped("a bc d", None, "> ") == ["> a bc d"]
    assert wrapped("", 9, "> ") == [">"]
    assert wrapped_list(["a: int", "b=1"], 9, "f(", "    ", ")") == ["f(a: int,", "    b=1)"]
    assert wrapped_list(["a", "b"], None, "f(", "    ", ")") == ["f(a, b)"]
    assert wrapped_list([], 40, "f(", "    ", ")") == ["f()"]


def test_lines_wider_than_the_terminal_are_wrapped_between_words(monkeypatch):
    text = "seed        A    B\n  " + "Goodput of updates " * 4 + "\n" + "x" * 50
    monkeypatch.delenv("COLUMNS", raising=False)
    assert fitting(text) == text
    monkeypatch.setenv("COLUMNS", "45")
    assert fitting(text).split("\n") == [
        "seed        A    B",
        "  Goodput of updates Goodput of updates",
        "    Goodput of updates Goodput of updates",
        "x" * 50,
    ]
