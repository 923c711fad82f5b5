"""A GPU for each worker of a cluster."""

import pytest

from ddl.errors import ConfigError
from ddl.launcher.gpus import with_a_gpu_each
from ddl.launcher.tasks import cluster_tasks

TWO = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1e2f-aa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77c0-bb)"""


def visible(tmp_path, monkeypatch, listed, named=None, workers=2):
    """Returns the GPU of each task, where nvidia-smi prints `listed`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    tasks = with_a_gpu_each(cluster_tasks(workers))
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
    with pytest.raises(ConfigError, match="needs 3 GPUs for --num_workers=3, got 2. Lower"):
        visible(tmp_path, monkeypatch, listed, named, workers=3)
