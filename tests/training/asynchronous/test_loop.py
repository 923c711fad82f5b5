"""Asynchronous training, on a cluster in a process of its own (cases.py)."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.processes import forked
from tests.run.whole_runs import ROOT
from tests.training.asynchronous.cases import PARITY


def run(workers: int, *names: str, servers: int = 2, folder: str | Path = "") -> dict:
    """Runs functions of cases.py on a cluster; returns their results by name."""
    module, numbers = "tests.training.asynchronous.cases", (str(workers), str(servers))
    done = forked.run(
        [sys.executable, "-m", module, *numbers, *names],
        cwd=ROOT,
        env={**os.environ, "CASES": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


@pytest.fixture(scope="module")
def two_workers():
    return run(2, "by_split", "counts", "overflows", "bfloat16", "rmsprop", "refused")


@pytest.mark.slow
def test_one_worker_trains_what_one_device_does():
    """It waits for nobody, so that nothing of an update may differ."""
    found = run(1, "parity", "ranges")
    assert found["parity"].keys() == set(PARITY)
    for name, differences in found["parity"].items():
        assert differences
        for kind, difference in differences.items():
            assert difference <= 1e-10, (name, kind)
    assert max(found["ranges"]) <= 1e-10


@pytest.mark.slow
def test_every_update_of_every_worker_is_counted(two_workers):
    found = two_workers["counts"]
    assert found["step"] == found["iterations"] == found["batches"] == 400
    assert found["examples"] == 0  # read, and begun anew
    assert found["loss"] < 0.8
    assert found["traces"] == 1


@pytest.mark.slow
def test_each_worker_has_temporary_variables_of_its_own(two_workers):
    assert two_workers["rmsprop"] < 0.8


@pytest.mark.slow
def test_workers_share_an_evaluation(two_workers):
    ours, theirs = two_workers["counts"]["evaluation"]
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
def test_each_split_reports_its_own_figures(two_workers):
    trained, trained_alone, evaluated, evaluated_alone = two_workers["by_split"]
    assert trained.keys() == {"loss", "accuracy", "AUC", "twos"}
    assert trained["twos"] == 2
    assert trained == pytest.approx(trained_alone, abs=1e-6)
    assert evaluated["AUC"] == pytest.approx(evaluated_alone["AUC"], abs=1e-6)
    assert evaluated.keys() == {"loss", "accuracy", "AUC", "position"}
    assert evaluated["position"] == 5


@pytest.mark.slow
def test_overflows_are_skipped_and_lower_the_scale(two_workers):
    found = two_workers["overflows"]
    assert found["step"] == found["iterations"] == 200
    assert found["skipped"] >= 1
    assert 1 <= found["scale"] < 2.0**24
    # Two workers that overflow at one scale halve it once.
    assert found["scale"] >= 2.0 ** (24 - found["skipped"])
    assert found["finite"]
    assert found["loss"] < 0.9


@pytest.mark.slow
def test_bfloat16_needs_no_scale(two_workers):
    found = two_workers["bfloat16"]
    assert found["step"] == 200
    assert found["scale"] is None
    assert found["loss"] < 0.9


@pytest.mark.slow
def test_only_arrays_can_be_sent(two_workers):
    assert "got RandomAccessSource. Convert the data to TFRecord" in two_workers["refused"][0]


@pytest.mark.slow
def test_nothing_predicts(two_workers):
    for name, error in zip(("predict", "--mode=predict"), two_workers["refused"][1:], strict=True):
        assert error == (
            f"{name} does not run with parameter servers. Export the model, or restore a "
            "checkpoint under another strategy."
        )
