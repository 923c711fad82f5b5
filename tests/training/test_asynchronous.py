"""Asynchronous training, on a cluster in a process of its own (asynchronous_cases.py)."""

import json
import sys

import numpy as np
import pytest

from tests.processes import forked
from tests.run.whole_runs import ROOT


@pytest.mark.processes
def test_two_workers():
    """One cluster, since its start takes longest."""
    done = forked.run(
        [sys.executable, "-m", "tests.training.asynchronous_cases"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["differences"]) <= 1e-10  # one worker at a time trains what one device does
    assert found["step"] == found["iterations"] == found["batches"] == 400
    assert found["examples"] == 0  # read, and begun anew
    assert found["loss"] < 0.8
    assert found["traces"] == 1
    assert found["evaluations"][0] == pytest.approx(found["evaluations"][1], abs=1e-5)
    np.testing.assert_allclose(*found["predictions"], atol=1e-5)
    of_source, of_scale = found["refused"]
    assert "they cannot read list. Pass arrays of numbers, or ddl.data.stream" in of_source
    assert "cannot scale the loss" in of_scale
