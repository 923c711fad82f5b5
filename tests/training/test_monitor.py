"""Figures of the machine: waits for input, and busy GPUs."""

import sys
import types

import pytest

from ddl.training import monitor
from ddl.training.pace import Monitor


class Trained:
    """What a Monitor reads of a trainer."""

    def __init__(self, waited):
        self.seconds_of_input = waited
        self.pace = types.SimpleNamespace(timed_seconds=10.0)

    def train(self, seconds, waited):
        self.pace.timed_seconds += seconds
        self.seconds_of_input += waited


@pytest.fixture
def driver(monkeypatch):
    """A driver that knows three GPUs; a part of the third has no rates."""

    class NVMLError(Exception):
        pass

    def rates(handle):
        if handle == "GPU-c":
            raise NVMLError
        return types.SimpleNamespace(gpu={"of index 0": 25, "of index 1": 75}[handle])

    library = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByIndex = lambda index: f"of index {index}"
    library.nvmlDeviceGetHandleByUUID = lambda name: name
    library.nvmlDeviceGetUtilizationRates = rates
    monkeypatch.setitem(sys.modules, "pynvml", library)
    devices = [types.SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in (0, 1)]
    monkeypatch.setattr(monitor.tf.config, "get_visible_devices", lambda kind: devices)
    return library


def test_the_share_of_input_is_that_since_the_last_log():
    trainer = Trained(waited=3.0)
    found = Monitor(trainer)
    trainer.train(seconds=4.0, waited=1.0)
    assert found.figures() == {"input_share": 0.25}
    trainer.train(seconds=2.0, waited=1.5)
    assert found.figures() == {"input_share": 0.75}


def test_without_a_timed_loop_or_a_measure_there_is_no_share():
    assert Monitor(Trained(waited=3.0)).figures() == {}
    assert Monitor(Trained(waited=None)).figures() == {}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"gpu_utilization/0": 0.25, "gpu_utilization/1": 0.75}),
        ("1, 0", {"gpu_utilization/0": 0.75, "gpu_utilization/1": 0.25}),
        ("1,GPU-c", {"gpu_utilization/0": 0.75}),
        ("1", {"gpu_utilization/0": 0.75}),
    ],
)
def test_gpus_are_those_that_tensorflow_counts(driver, monkeypatch, visible, expected):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Monitor(Trained(waited=None)).figures() == expected


def test_without_a_driver_there_are_no_gpus(driver):
    def fails():
        raise driver.NVMLError

    driver.nvmlInit = fails
    assert Monitor(Trained(waited=None)).figures() == {}
