"""The memory that a device has for each replica."""

import types

import pytest
import tensorflow as tf

from ddl.run.memory import available_to_replica, of_device
from tests.conftest import make_strategy


@pytest.mark.parametrize(("limit", "expected"), [(None, 2**33), (100, 100 * 2**20)])
def test_replicas_on_cpus_share_the_host_or_the_limit(monkeypatch, tmp_path, limit, expected):
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "bytes").write_text(f"{2**33}\n")
    files = [tmp_path / "none", tmp_path / "max", tmp_path / "bytes"]
    limits = of_device._limits_of_group
    monkeypatch.setattr(of_device, "_limits_of_group", lambda: limits(files))
    monkeypatch.setattr(of_device, "memory_of_host", lambda: 2**40)
    found = available_to_replica(make_strategy("mirrored", 4), limit)
    assert found.bytes == expected // 4
    what = "process" if limit else "host"
    assert found.text.endswith(f", for each of the 4 replicas of this {what}")


def test_workers_on_one_host_are_counted():
    cluster = {"chief": ["a:1"], "worker": ["b:1", "a:2", "c:9"], "evaluator": ["a:7"]}
    assert [of_device.workers_beside(cluster, index) for index in range(4)] == [2, 1, 2, 1]
    assert of_device.workers_beside({}, 0) == 1


@pytest.mark.parametrize(
    ("device", "parts", "totals", "limit", "expected"),
    [
        ("/job:worker/replica:0/task:1/device:GPU:1", None, {1: 80}, None, (80, "of the GPU")),
        ("/device:GPU:1", [5, 6], {}, None, (6 * 2**20, "of the virtual GPU")),
        ("/device:GPU:0", None, {0: 80}, 7, (7 * 2**20, "--memory_limit")),
        ("/device:GPU:0", None, {}, None, (None, "unknown: install nvidia-ml-py, or pass")),
    ],
)
def test_gpus(monkeypatch, device, parts, totals, limit, expected):
    """Two GPUs, or the first one in two parts."""
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in (0, 1)]
    logical = [tf.config.LogicalDevice(f"/device:GPU:{n}", "GPU") for n in (0, 1)]
    of_parts = [tf.config.LogicalDeviceConfiguration(memory_limit=n) for n in parts or ()]
    monkeypatch.setattr(of_device, "replica_devices", lambda _: (device,))
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda _: logical)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: gpus)
    monkeypatch.setattr(
        *(tf.config, "get_logical_device_configuration"),
        lambda gpu: of_parts if gpu is gpus[0] else None,
    )
    monkeypatch.setattr(
        *(of_device, "Gpus"),
        lambda names: types.SimpleNamespace(
            total_bytes=lambda: {n: b for n, b in totals.items() if names == [gpus[n].name]}
        ),
    )
    found = available_to_replica(make_strategy("one_device", 1), limit)
    assert found.bytes == expected[0]
    assert found.text.startswith(expected[1])
