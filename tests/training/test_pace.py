import itertools
import sys
import types

import pytest

from ddl.training import pace as module
from ddl.training.pace import Monitor, Pace


def test_loops_grow_to_the_target_and_stay_there():
    pace, lengths = Pace(target_seconds=1.0), []
    for _ in range(10):
        lengths.append(pace.steps_per_loop)
        pace.add(lengths[-1], lengths[-1] * 0.001)
    assert lengths[0] == 1
    assert all(later <= 4 * earlier for earlier, later in itertools.pairwise(lengths))
    assert 999 <= lengths[-1] <= 1000
    pace.add(lengths[-1], 5.0 * lengths[-1])  # slow steps make loops of one
    assert pace.steps_per_loop == 1


def test_a_traced_loop_counts_neither_for_the_pace_nor_for_the_speed():
    pace = Pace()
    pace.add(1, 30.0, traced=True)
    assert (pace.take_steps_per_second(), pace.steps_per_loop) == (None, 1)
    pace.add(2, 0.2)
    assert pace.take_steps_per_second() == pytest.approx(10.0)
    assert pace.take_steps_per_second() is None
    assert pace.total_seconds == pytest.approx(30.2)


def test_the_share_of_input_is_that_since_the_last_log(monkeypatch):
    monkeypatch.setattr(module.tf.config, "get_visible_devices", lambda kind: [])
    pace = Pace()
    monitor = Monitor(types.SimpleNamespace(pace=pace))
    assert monitor.figures() == {}
    pace.add(1, 4.0, 1.0)
    assert monitor.figures() == {"input_share": 0.25}
    pace.add(1, 2.0, 1.5)
    assert monitor.figures() == {"input_share": 0.75}
    pace.add(1, 2.0, None)  # unknown
    assert monitor.figures() == {}


def test_busy_gpus(monkeypatch):
    """A part of the second GPU has no rates."""

    class NVMLError(Exception):
        pass

    def rates(handle):
        if handle == "GPU-b":
            raise NVMLError
        return types.SimpleNamespace(gpu={"of index 3": 25}[handle])

    library = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"of index {index}",
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetUtilizationRates=rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
    devices = [types.SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in (0, 1)]
    monkeypatch.setattr(module.tf.config, "get_visible_devices", lambda kind: devices)
    assert Monitor(types.SimpleNamespace(pace=Pace())).figures() == {"gpu_utilization/0": 0.25}
