"""Cores and GPUs for each process of a cluster."""

import os

import pytest

from ddl.errors import ConfigError
from ddl.launcher.pinning import pinned
from ddl.launcher.tasks import cluster_tasks


def test_cores_are_shared_alike_and_only_those_at_hand(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {901, 903, 905, 907, 909})
    chief, *workers, server = pinned(cluster_tasks(2, 1), "cores")
    assert [task.cores for task in workers] == [{901, 903}, {905, 907}]
    assert [task.environment for task in workers] == [{"TF_NUM_INTRAOP_THREADS": "2"}] * 2
    assert [chief, server] == [cluster_tasks(2, 1)[0], cluster_tasks(2, 1)[-1]]
    with pytest.raises(ConfigError, match="needs 6 cores for --num_workers=6, got 5. Lower"):
        pinned(cluster_tasks(6), "cores")


TWO = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1e2f-aa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77c0-bb)"""


def visible(tmp_path, monkeypatch, listed, named=None, servers=0, workers=2):
    """Returns the GPU of each task, where nvidia-smi prints `listed`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    tasks = pinned(cluster_tasks(workers, servers), "gpus")
    return [task.environment["CUDA_VISIBLE_DEVICES"] for task in tasks]


@pytest.mark.parametrize(
    ("listed", "named", "gpus"),
    [
        (TWO, None, ["GPU-1e2f-aa", "GPU-77c0-bb"]),
        (TWO, "1,0", ["1", "0"]),
        (TWO, "GPU-77, GPU-1e", ["GPU-77", "GPU-1e"]),
    ],
)
def test_each_worker_has_a_gpu(monkeypatch, tmp_path, listed, named, gpus):
    assert visible(tmp_path, monkeypatch, listed, named) == gpus
    with pytest.raises(ConfigError, match="needs 3 gpus for --num_workers=3, got 2. Lower"):
        visible(tmp_path, monkeypatch, listed, named, workers=3)
