"""Memory of the process, and NVIDIA's library, of which only the calls are replaced."""

import sys
import types

import pytest

from ddl.run.timing.machine import Gpus, memory_of_process

NAMES = ["/physical_device:GPU:0", "/physical_device:GPU:1"]


class NVMLError(Exception):
    pass


class Pynvml(types.ModuleType):
    """Four GPUs, of which the third tells no rates, with the functions that nvidia-ml-py has."""

    NVMLError = NVMLError
    has_driver = True

    def nvmlInit(self):  # noqa: N802
        if not self.has_driver:
            raise NVMLError

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index > 3:
            raise NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if handle == 2:
            raise NVMLError
        return types.SimpleNamespace(gpu=10 * handle, memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return types.SimpleNamespace(used=handle * 2**30, total=2**36, free=0)


@pytest.fixture
def library(monkeypatch):
    library = Pynvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.mark.parametrize(
    ("visible", "figures"),
    [
        (None, {"gpu_utilization/1": 0.1, "gpu_memory_mib/0": 0, "gpu_memory_mib/1": 1024}),
        ("3, GPU-b", {"gpu_utilization/1": 0.1, "gpu_memory_mib/0": 3072}),
        ("1,2", {"gpu_utilization/0": 0.1, "gpu_memory_mib/1": 2048}),
    ],
)
def test_figures_of_the_visible_gpus(library, monkeypatch, visible, figures):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = Gpus(NAMES).figures()
    assert figures.items() <= found.items()
    assert set(Gpus(NAMES).total_bytes().values()) == {2**36}
    assert ("gpu_utilization/1" in found) == (visible != "1,2")


def test_without_a_driver_or_the_library_or_a_gpu_there_are_no_figures(library, monkeypatch):
    assert Gpus([]).figures() == {}
    assert Gpus(["/physical_device:GPU:7"]).figures() == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert list(Gpus(NAMES).figures()) == ["gpu_utilization/0", "gpu_memory_mib/0"]
    library.has_driver = False
    assert Gpus(NAMES).figures() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus(NAMES).figures() == {}


def test_memory_of_this_process(tmp_path):
    before = memory_of_process()["process_memory_mib"]
    block = bytearray(2**26)
    block[::4096] = b"x" * len(block[::4096])
    assert 60 < memory_of_process()["process_memory_mib"] - before < 200
    assert memory_of_process(tmp_path / "none") == {}
    (tmp_path / "odd").write_text("1")
    assert memory_of_process(tmp_path / "odd") == {}
