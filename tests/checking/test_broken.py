"""Factories that fail, and configs that do not exist: one clear message, nothing left behind."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ddl import check as door
from ddl import output
from ddl.checking import check, checked, processes, worker
from ddl.checking.configurations import ONE, WRITER
from ddl.checking.recording import Recording
from ddl.errors import ConfigError
from tests.checking import broken
from tests.checking.test_check import in_this_process
from tests.conftest import make_strategy
from tests.run.whole_runs import ROOT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"'tests.checking.broken:raises' raised ZeroDivisionError.*broken.py:\d+\n"),
        ("ends", r"The factory .* raised SystemExit: no such data set\n  raised in tests/checking"),
        ("nothing", r"must return a ddl.Trainer, got None. End it with `return ddl.Trainer"),
        ("one_argument", r"a function of \(strategy, accumulation_steps\), got .*\(strategy\)"),
        ("CONSTANT", r"a function of \(strategy, accumulation_steps\), got 3"),
        ("absent", "cannot be imported"),
    ],
)
def test_a_factory_that_fails_is_one_message(name, message, tmp_path):
    job = {"factory": f"{broken.__name__}:{name}", "folder": str(tmp_path)}
    recording = Recording()
    worker.run(job, ONE, make_strategy("one_device", 1), recording)
    assert re.search(f"(?s){message}", recording.mistake or "no mistake"), recording


def test_microbatches_must_be_passed_on(tmp_path):
    job = {"factory": f"{broken.__name__}:ignores_microbatches", "folder": str(tmp_path)}
    recording = Recording()
    strategy = make_strategy("one_device", 1)
    worker.run(job, ONE._replace(microbatches=2), strategy, recording)
    assert "accumulation_steps on to ddl.Trainer: expected 2, got 1" in recording.mistake


def test_random_names_are_told(tmp_path):
    report = in_this_process(broken, "random_names", [WRITER], tmp_path)
    assert "The layers have other names in each run" in str(report)


@pytest.mark.parametrize("name", ["three_rows", "one_row", "by_lambda"])
def test_few_rows_and_a_lambda_in_a_module_are_checked(name, tmp_path):
    assert in_this_process(broken, name, [WRITER], tmp_path).same


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda strategy, accumulation_steps: None, "got <function .*which import it"),
        (None, "takes the name of a function in a module.*got None"),
        ("__main__:make", "a function of this program or notebook.*Write it into a file"),
        ("module", "takes the name of a function"),
        ("module:a b", "takes the name of a function"),
        (":make", "takes the name of a function"),
    ],
)
def test_a_name_that_processes_cannot_import(factory, message):
    with pytest.raises(ConfigError, match=message):
        check(factory)


def test_a_missing_config_is_found_before_processes_start(monkeypatch, capsys):
    monkeypatch.setattr(checked, "record", None)
    monkeypatch.setattr(output, "_program", output._program)
    with pytest.raises(SystemExit) as exit_:
        door.run(["check", "--gin_file=absent.gin"])
    for name in door.FLAGS:
        door.FLAGS[name].unparse()
    assert exit_.value.code == 1
    assert "absent.gin" in capsys.readouterr().err


@pytest.fixture
def own_folders(monkeypatch, tmp_path):
    """The folder of temporary files, for this process and for those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def has_ended(process_id, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("forked_checks")
def test_nothing_is_left_of_a_factory_that_fails(own_folders):
    """Neither its processes nor what they have started; what it prints is not in the message."""
    with pytest.raises(ConfigError, match=r"raised RuntimeError: started \d+") as caught:
        check(f"{broken.__name__}:with_a_child")
    assert len(str(caught.value)) < 1000
    assert has_ended(re.search(r"started (\d+)", str(caught.value))[1])
    assert not list(own_folders.glob("ddl-check-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_is_ended(number, own_folders):
    """A folder stays after SIGKILL, which no process can handle."""
    process = subprocess.Popen(  # not forked, since a fork has the template's temporary folder
        [sys.executable, "-m", "ddl.check", "--gin_file=digits_mlp.gin"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = []
    while not children or not list(own_folders.glob("ddl-check-*/*.log")):
        assert process.poll() is None
        time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    process.wait()
    assert all(has_ended(child) for child in children)
    if number == signal.SIGTERM:
        assert process.returncode == 143
        assert not list(own_folders.glob("ddl-check-*"))


def test_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "1x1.log"
    log.write_bytes(b"x" * 10_000_000 + b"\n" + b"last\n")
    with subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"]) as process:
        process.wait()
    one = processes._Process(ONE, process, log, time.monotonic())
    text = processes._crash(one, 900)
    assert text.startswith("The process ended with status 3.")
    assert text.endswith("last")
    assert len(text) < 1000
