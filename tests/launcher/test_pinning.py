"""Cores and GPUs for each process of a cluster."""

import json
import os

import pytest

from ddl.errors import ConfigError
from ddl.launcher.pinning import pin_tasks
from ddl.launcher.tasks import cluster_tasks
from tests.launcher.programs import finish


def test_pinned_to_cores(launch, tmp_path):
    cores = os.sched_getaffinity(0)
    workers = min(2, len(cores))
    program = """
cores = sorted(os.sched_getaffinity(0))
note(f"{name}.json", json.dumps([cores, os.environ.get("TF_NUM_INTRAOP_THREADS")]))
"""
    status, _, _ = finish(launch(program, workers, pin="cores"))
    assert status == 0
    told = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(workers)]
    share = len(cores) // workers
    for own, threads in told:
        assert len(own) == share
        assert set(own) <= cores
        assert threads == str(share)
    assert len({core for own, _ in told for core in own}) == share * workers


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


def test_pinned_to_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("ddl.launcher.pinning._DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible(pin_tasks(cluster_tasks(2), "gpus")) == ["0", "1"]
    assert visible(pin_tasks(cluster_tasks(2, 1), "gpus")) == ["", "0", "1", ""]
    with pytest.raises(ConfigError, match="needs 3 GPUs for --num_workers=3, got 2. Lower"):
        pin_tasks(cluster_tasks(3), "gpus")


@pytest.mark.parametrize(
    ("text", "named"), [("4,7", ["4", "7"]), ("GPU-a, GPU-b,-1,3", ["GPU-a", "GPU-b"]), ("", [])]
)
def test_gpus_that_are_named(monkeypatch, text, named):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert visible(pin_tasks(cluster_tasks(len(named)), "gpus")) == named
    with pytest.raises(ConfigError, match=f"got {len(named)}. Lower"):
        pin_tasks(cluster_tasks(len(named) + 1), "gpus")


def test_not_pinned(launch, tmp_path):
    program = "note(f'{name}.json', json.dumps(sorted(os.sched_getaffinity(0))))"
    finish(launch(program))
    assert set(json.loads((tmp_path / "worker-1.json").read_text())) == os.sched_getaffinity(0)
