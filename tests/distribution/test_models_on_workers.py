"""Two workers train each model and task as one device does, and resume."""

import numpy as np
import pytest

from ddl.training.checks.row_independence import RowIndependence
from tests.distribution.whole_clusters import addresses, finish_all, start_worker
from tests.training.model_cases import ALL, OnOneDevice, assert_close, assert_same


@pytest.mark.slow
def test_two_workers_compute_what_one_device_computes(tmp_path, monkeypatch):
    """All in one cluster, which takes seconds to start. The workers compare what they resumed."""
    hosts, saved = addresses(2), tmp_path / "workers"
    saved.mkdir()
    program = ("-m", "tests.distribution.models_on_workers", str(saved))
    started = [start_worker(index, hosts, program=program) for index in (0, 1)]
    ended = finish_all(started, timeout=1800)
    for status, output in ended:
        assert status == 0, output
    monkeypatch.setattr(RowIndependence, "check", lambda *_: None)
    on_one_device = OnOneDevice(tmp_path / "one")
    for name in ALL:
        first, second = (dict(np.load(saved / f"{index}/{name}.npz")) for index in (0, 1))
        assert_same(first, second)
        assert_close(first, on_one_device.results(name))
        assert_close(on_one_device.resumed(name, saved / name), first)
