"""Output that fails, and the commands whose output it is."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddl import output
from ddl.output import FailSafeStream, printable, report_failures_in, say, standard_output
from ddl.run.console import RunConsole
from tests.processes import forked

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _reports_of_its_own(monkeypatch):
    monkeypatch.setattr(output, "_REPORTS", output._Reports())
    monkeypatch.setattr(output, "_WRAPPED", {})


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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (full_disk, "No space left on device"),
        (ended_reader, "Broken pipe"),
        (closed, "I/O operation on closed file"),
    ],
)
def test_a_failure_is_reported_once_on_standard_error(monkeypatch, capsys, make, reason):
    broken = make()
    monkeypatch.setattr(sys, "stdout", broken)
    console = RunConsole()
    for step in range(3):
        console.write(step, 0.0, "train", {"loss": 1.0})
    assert capsys.readouterr().err == (
        f"ddl: Standard output cannot be written: {reason}. ddl continues without it.\n"
    )
    drop(broken)


def test_without_standard_error_reports_go_to_a_file_of_the_run(monkeypatch, tmp_path):
    broken = [full_disk(), full_disk()]
    monkeypatch.setattr(sys, "stdout", broken[0])
    monkeypatch.setattr(sys, "stderr", broken[1])
    console = RunConsole()
    report_failures_in(tmp_path / "run")
    console.line("before the folder is there")
    (tmp_path / "run").mkdir()
    for _ in range(3):
        console.line("and afterwards")
        say("an error")
    lines = (tmp_path / "run" / "output_errors.txt").read_text().splitlines()
    assert sorted(lines) == [
        f"ddl: Standard {name} cannot be written: No space left on device. "
        "ddl continues without it."
        for name in ("error", "output")
    ]
    for stream in broken:
        drop(stream)


def test_a_reader_of_the_help_may_end(monkeypatch, capsys):
    broken = ended_reader()
    monkeypatch.setattr(sys, "stdout", broken)
    output._REPORTS.quiet = True
    standard_output().write("help")
    standard_output().flush()
    assert capsys.readouterr().err == ""
    drop(broken)


def test_an_encoding_without_a_character_gets_another_one():
    encoded = io.BytesIO()
    stream = FailSafeStream(io.TextIOWrapper(encoded, "ascii"))
    stream.write("step 1 · loss 2 × 3 …\u03c0\n")
    stream.flush()
    assert encoded.getvalue() == b"step 1 - loss 2 x 3 ...\\u03c0\n"
    assert not stream.failed


def test_a_name_of_a_file_that_is_no_text_can_be_printed():
    encoded = io.BytesIO()
    stream = FailSafeStream(io.TextIOWrapper(encoded, "utf-8"))
    stream.write(os.fsdecode(b"runs/\xff"))
    stream.flush()
    assert encoded.getvalue() == b"runs/\\udcff"


def test_control_characters_are_escaped():
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("x\x1b[2J\r\x07\x9b") == r"x\x1b[2J\r\x07\x9b"


@pytest.mark.parametrize(
    ("redirection", "errors"),
    [
        ("| head -1", ""),
        ("> /dev/full", "ddl: Standard output cannot be written: No space left on device. "),
        (">&-", ""),
        ("2>&-", ""),
    ],
)
def test_help_ends_well_whatever_becomes_of_it(redirection, errors):
    command = f"set -o pipefail; {sys.executable} -m ddl.main --help {redirection}"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0
    assert result.stderr.startswith(errors)
    assert len(result.stderr.splitlines()) == bool(errors)


@pytest.mark.parametrize("make", [full_disk, ended_reader])  # as in `ddl train … | head -1`
def test_a_run_whose_output_fails_goes_to_its_end(tmp_path, make):
    command = [sys.executable, "-m", "ddl.main", f"--gin_file={ROOT}/configs/digits_mlp.gin"]
    plan = ("TRAIN_STEPS = 4", "LOG_EVERY = 2", "EVAL_EVERY = 4", "CHECKPOINT_EVERY = 4")
    command += [f"--gin_param={param}" for param in plan]
    with make() as failing, full_disk() as full:
        process = forked.Popen(
            [*command, f"--model_dir={tmp_path}/run"], cwd=ROOT, stdout=failing, stderr=full
        )
        assert process.wait(120) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (
        "Standard output cannot be written" in (tmp_path / "run" / "output_errors.txt").read_text()
    )
