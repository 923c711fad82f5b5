"""Output that fails, and the commands whose output it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddl.output import printable

ROOT = Path(__file__).parent.parent


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
