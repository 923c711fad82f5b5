"""Cores and GPUs for each process of a cluster."""

import os

import pytest

from ddl.errors import ConfigError
from ddl.launcher.gpus import visible_gpus
from ddl.launcher.pinning import pin_tasks
from ddl.launcher.tasks import cluster_tasks


def test_cores_are_shared_alike_and_only_those_at_hand(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {901, 903, 905, 907, 909})
    chief, *workers, server = pin_tasks(cluster_tasks(2, 1), "cores")
    assert [place.cores for place in workers] == [{901, 903}, {905, 907}]
    assert [dict(place.environment) for place in workers] == [{"TF_NUM_INTRAOP_THREADS": "2"}] * 2
    assert chief == server
    assert chief.cores is None
    with pytest.raises(ConfigError, match="needs 6 cores for --num_workers=6, got 5. Lower"):
        pin_tasks(cluster_tasks(6), "cores")


def test_threads_of_one_core_stay_together(monkeypatch, tmp_path):
    """Cores 0 and 2 are two threads of one core here, and so are 1 and 3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr("ddl.launcher.pinning._ALL_CORES", tmp_path)
    for core in range(4):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core % 2}\n")
    places = pin_tasks(cluster_tasks(2), "cores")
    assert [place.cores for place in places] == [{0, 2}, {1, 3}]


def visible(places) -> list[str]:
    return [place.environment["CUDA_VISIBLE_DEVICES"] for place in places]


def say(tmp_path, monkeypatch, text, status=0):
    """Puts an nvidia-smi that prints the text in the place of the machine's own."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


TWO = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1e2f-aa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77c0-bb)"""
DIVIDED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89-aa)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7b5-1)
  MIG 3g.20gb     Device  1: (UUID: MIG-c7b5-2)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89-bb)"""


def test_pinned_to_gpus(monkeypatch, tmp_path):
    say(tmp_path, monkeypatch, TWO)
    assert visible(pin_tasks(cluster_tasks(2), "gpus")) == ["GPU-1e2f-aa", "GPU-77c0-bb"]
    assert visible(pin_tasks(cluster_tasks(1, 1), "gpus")) == ["", "GPU-1e2f-aa", ""]
    with pytest.raises(ConfigError, match="needs 3 GPUs for --num_workers=3, got 2. Lower"):
        pin_tasks(cluster_tasks(3), "gpus")


def test_instances_of_a_divided_gpu_count(monkeypatch, tmp_path):
    say(tmp_path, monkeypatch, DIVIDED)
    assert visible_gpus() == ["MIG-c7b5-1", "MIG-c7b5-2", "GPU-5c89-bb"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1,0", ["1", "0"]),
        ("1,4,0", ["1"]),
        ("GPU-77, GPU-1e,-1,0", ["GPU-77", "GPU-1e"]),
        ("GPU-1e,GPU-no,0", ["GPU-1e"]),
        ("", []),
    ],
)
def test_gpus_that_are_named(monkeypatch, tmp_path, text, named):
    """As CUDA reads the variable: up to the first entry that does not exist."""
    say(tmp_path, monkeypatch, TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert visible(pin_tasks(cluster_tasks(len(named)), "gpus")) == named
    with pytest.raises(ConfigError, match=f"got {len(named)}. Lower"):
        pin_tasks(cluster_tasks(len(named) + 1), "gpus")


def test_named_gpus_need_no_nvidia_smi(monkeypatch, tmp_path):
    say(tmp_path, monkeypatch, "Failed to initialize NVML", status=9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,MIG-c7b5-1")
    assert visible_gpus() == ["4", "MIG-c7b5-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,4")
    with pytest.raises(ConfigError, match="must name each GPU once for --pin=gpus, got '4,7,4'"):
        visible_gpus()


def test_without_a_driver_the_error_says_so(monkeypatch, tmp_path):
    say(tmp_path, monkeypatch, "Failed to initialize NVML", status=9)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libcuda.so.1").write_text("no library")
    message = "needs NVIDIA's driver, but neither nvidia-smi nor libcuda.so.1 answers: .*libcuda"
    with pytest.raises(ConfigError, match=message):
        pin_tasks(cluster_tasks(1), "gpus")
