"""The check finds planted mistakes and no others."""

import functools

import keras
import numpy as np
import pytest

import ddl
from ddl.checking import Report, check, checked
from ddl.checking.from_config import first_examples
from ddl.checking.report import CAUSES, RESUMED, TWO
from ddl.errors import ConfigError
from tests.checking import tasks

Resuming = checked.Resuming


class InThisProcess:
    """Resumes in this process, by a trainer of its own."""

    def __init__(self, make_trainer, folder):
        self.result = functools.partial(checked.run, make_trainer, RESUMED, folder)

    def end(self):
        pass


@pytest.fixture(autouse=True)
def _resumes_nothing(monkeypatch):
    """Spares the resumed run where a test does not ask for it."""
    monkeypatch.setattr(checked, "Resuming", lambda *_: None)


@pytest.mark.parametrize("name", tasks.EXPECTED)
def test_a_planted_mistake_is_found_on_two_devices(name, monkeypatch):
    monkeypatch.setattr(checked, "PLACES", (TWO,))
    kind, cause = tasks.EXPECTED[name]
    if cause == "not in the checkpoint":
        monkeypatch.setattr(checked, "Resuming", InThisProcess)
    report = check(getattr(tasks, name))
    first = report.differences[0]
    assert first.place == (RESUMED if cause == "not in the checkpoint" else TWO)
    found = first.found.value.kind if first.found else "error"
    assert (found, first.cause) == (kind, cause), report
    assert CAUSES[cause][1] in str(report)


def test_a_refusal_of_the_trainer_is_raised():
    with pytest.raises(ConfigError, match="not depend on other examples"):
        check(tasks.a_loss_across_examples)


def test_a_right_step_is_the_same_everywhere(monkeypatch):
    """Two models and optimizers, and draws by ddl.random."""
    monkeypatch.setattr(checked, "Resuming", InThisProcess)
    report = check(tasks.gan)
    assert report.same, report
    assert report.places == [*checked.PLACES, RESUMED]
    assert report.largest < 1e-10
    assert "Gan computes the same everywhere, in float64." in str(report)
    assert not report.notes


def test_what_is_not_checked_is_said(monkeypatch):
    """Evaluations are compared; 6 rows do not divide among 4 devices; 40 are more than 3 batches.

    Keras keeps its precision of before.
    """
    monkeypatch.setattr(checked, "PLACES", (TWO, checked.FOUR))
    run, runs = checked.run, []
    monkeypatch.setattr(checked, "run", lambda *given: runs.append(run(*given)) or runs[-1])
    report = check(tasks.batches_of_six)
    assert report.same, report
    assert checked.FOUR not in report.places
    assert "4 devices were not checked: they do not divide 6 rows." in str(report)
    assert "No batch with padding was checked." in str(report)
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"
    assert {("train figure", "loss"), ("eval figure", "loss")} < {v[1:3] for v in runs[0].values}


# ------------------------------------------------------------ configs and the command


@pytest.mark.parametrize(("rows", "kept"), [(100, 41), (33, 33), (20, 20), (3, 3)])
def test_data_are_cut_so_that_the_last_batch_has_padding(rows, kept):
    given = {"x": np.ones(rows, np.float32), "weight": np.ones(rows, np.float32)}
    short = first_examples(ddl.data.Source(given), 16)
    assert len(short) == kept
    assert (short.arrays["x"].dtype, short.arrays["weight"].dtype) == ("float64", "float32")
    decoded = first_examples(ddl.data.Source(given, lambda item, seed: {"y": item["x"]}), 16)
    assert (len(decoded), decoded.element_spec["y"].dtype) == (kept, "float64")


@pytest.mark.parametrize("same", [True, False])
def test_the_exit_status_says_whether_it_is_the_same(same, monkeypatch, capsys):
    differences = [] if same else [ddl.checking.Difference(TWO, "error", message="no")]
    report = Report("Tiny", differences, [TWO], 1, 0.0, [])
    monkeypatch.setattr("ddl.checking.check", lambda make_trainer: report)
    with pytest.raises(SystemExit) as exit_:
        ddl.check.run(["check", "--gin_file=x.gin"])
    assert exit_.value.code == (0 if same else 1)
    assert capsys.readouterr().out == f"{report}\n"


@pytest.mark.processes
def test_the_command_resumes_in_a_new_process(monkeypatch, capsys):
    monkeypatch.setattr(checked, "Resuming", Resuming)
    monkeypatch.setattr(checked, "PLACES", (TWO,))
    with pytest.raises(SystemExit, match="0"):
        ddl.check.run(["check", "--gin_file=configs/digits_mlp.gin"])
    shown = capsys.readouterr().out
    assert "Classification computes the same everywhere, in float64." in shown
    assert RESUMED.name in shown
