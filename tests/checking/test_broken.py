"""Factories that fail, and configs that do not exist: one clear message."""

import re

import pytest

from ddl import check as door
from ddl import output
from ddl.checking import check, checked, worker
from ddl.checking.configurations import ONE, WRITER
from ddl.checking.recording import Recording
from ddl.errors import ConfigError
from tests.checking import broken
from tests.checking.test_check import in_this_process
from tests.conftest import make_strategy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"'tests.checking.broken:raises' raised ZeroDivisionError.*broken.py:\d+\n"),
        ("ends", r"The factory .* raised SystemExit: no such data set\n  raised in tests/checking"),
        ("nothing", r"must return a ddl.Trainer, got None. End it with `return ddl.Trainer"),
        ("one_argument", r"a function of \(strategy, accumulation_steps\), got .*\(strategy\)"),
        ("CONSTANT", r"a function of \(strategy, accumulation_steps\), got 3"),
        ("absent", "cannot be imported"),
        ("ignores_microbatches", "accumulation_steps on to ddl.Trainer: expected 2, got 1"),
    ],
)
def test_a_factory_that_fails_is_one_message(name, message, tmp_path):
    job = {"factory": f"{broken.__name__}:{name}", "folder": str(tmp_path)}
    recording, where = Recording(), make_strategy("one_device", 1)
    microbatches = 2 if name == "ignores_microbatches" else 1
    worker.run(job, ONE._replace(microbatches=microbatches), where, recording)
    assert re.search(f"(?s){message}", recording.mistake or "no mistake"), recording


def test_random_names_are_reported(tmp_path):
    report = in_this_process(broken, "random_names", [WRITER], tmp_path)
    assert "The layers have other names in each run" in str(report)


def test_few_rows_are_checked(tmp_path):
    assert in_this_process(broken, "three_rows", [WRITER], tmp_path).same


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda strategy, accumulation_steps: None, "got <function .*which import it"),
        (None, "takes the name of a function in a module.*got None"),
        ("__main__:make", "a function of this program or notebook.*Write it into a file"),
        ("module", "takes the name of a function"),
        ("module:a b", "takes the name of a function"),
    ],
)
def test_a_name_that_processes_cannot_import(factory, message):
    with pytest.raises(ConfigError, match=message):
        check(factory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--gin_file is required. Pass a config"),
        (["--gin_file=x.gin", "--model_dir=y"], "model_dir"),
    ],
)
def test_bad_flags_are_found_before_processes_start(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(checked, "record", None)
    monkeypatch.setattr(output, "_program", output._program)
    with pytest.raises(SystemExit) as exit_:
        door.run(["check", *flags])
    assert exit_.value.code == 1
    assert message in capsys.readouterr().err
