"""Output that fails, and the commands whose output it is."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddl.output import printable, say
from ddl.run.console import RunConsole

ROOT = Path(__file__).parent.parent


def full_disk():
    return open("/dev/full", "w")


def ended_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def drop(stream):
    """Closes a stream that cannot write its last buffer."""
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.parametrize("make", [full_disk, ended_reader, closed, lambda: None])
def test_lines_of_a_run_that_cannot_be_written_are_dropped(monkeypatch, make):
    broken = [make(), make()]
    monkeypatch.setattr(sys, "stdout", broken[0])
    monkeypatch.setattr(sys, "stderr", broken[1])
    console = RunConsole()
    for step in range(3):
        console.write(step, 0.0, "train", {"loss": 1.0})
        say("an error")
    for stream in filter(None, broken):
        drop(stream)


def test_an_encoding_without_a_character_gets_another_one():
    program = "from ddl.output import *; protect_standard_streams('ddl'); print('1 · 2\\udcff')"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    assert result.stdout == b"1 \\xb7 2\\udcff\n"


def test_control_characters_are_escaped():
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("x\x1b[2J\r\x07\x9b") == r"x\x1b[2J\r\x07\x9b"


@pytest.mark.parametrize("redirection", ["| head -1", "> /dev/full", ">&-", "2>&-"])
def test_help_ends_well_whatever_becomes_of_it(redirection):
    command = f"set -o pipefail; {sys.executable} -m ddl.main --help {redirection}"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_wrong_flag_is_status_1_whatever_becomes_of_its_message():
    command = f"{sys.executable} -m ddl.main --no_such_flag 2> /dev/full"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 1
