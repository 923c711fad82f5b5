"""Asynchronous training, on a cluster in a process of its own (asynchronous_cases.py)."""

import json
import sys

import numpy as np
import pytest

from tests.processes import forked
from tests.run.whole_runs import ROOT


@pytest.mark.processes
def test_two_workers():
    """One cluster and one trainer, since their start takes longest."""
    names = ("trained", "streamed", "refused")
    command = [sys.executable, "-m", "tests.training.asynchronous_cases", "2", "2", *names]
    done = forked.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found: dict = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    counts = found["trained"]
    assert max(counts["distances"]) <= 1e-10
    assert counts["step"] == counts["iterations"] == counts["batches"] == 200
    assert counts["examples"] == 0  # read, and begun anew
    assert counts["loss"] < 0.8
    assert counts["traces"] == 1
    assert counts["evaluations"][0] == pytest.approx(counts["evaluations"][1], abs=1e-5)
    np.testing.assert_allclose(*counts["predictions"], atol=1e-5)
    step, first, last = found["streamed"]
    assert (step, last < first) == (70, True)
    of_source, of_stream, of_scale = found["refused"]
    assert "they cannot read list. Pass arrays of numbers, or ddl.data.stream" in of_source
    assert "they cannot read the stream, which calls " in of_stream
    assert "use --strategy=multi_worker_mirrored" in of_stream
    assert "cannot scale the loss" in of_scale
