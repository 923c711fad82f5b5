"""The choice and the splitting of devices: GPUs on a machine that pretends to have two of 8 GiB."""

import pytest
import tensorflow as tf

from ddl.distribution import devices
from ddl.distribution.communication import reduce_options
from ddl.distribution.devices import configure_devices
from ddl.distribution.path import GPU, VIRTUAL_GPU, path_of
from ddl.run.plan import describe_devices

SHARED = int(8192 * 0.85)


class Machine:
    """TensorFlow's settings of devices, before it has started."""

    def __init__(self) -> None:
        self.gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in (0, 1)]
        self.visible = list(self.gpus)
        self.parts: dict[str, list] = {}
        self.grows: list[str] = []

    def list_physical_devices(self, kind):
        return self.gpus if kind == "GPU" else [tf.config.PhysicalDevice("CPU:0", "CPU")]

    def get_visible_devices(self, kind):
        return self.visible if kind == "GPU" else []

    def set_visible_devices(self, chosen, kind):
        self.visible = list(chosen)

    def get_logical_device_configuration(self, gpu):
        return self.parts.get(gpu.name)

    def set_logical_device_configuration(self, gpu, parts):
        self.parts[gpu.name] = parts

    def list_logical_devices(self, kind):
        number = sum(len(self.parts.get(gpu.name, [None])) for gpu in self.visible)
        return [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(number)]


class Replicas:
    """A strategy over all logical GPUs."""

    _should_use_with_coordinator = False

    def __init__(self, number: int):
        self.extended = self
        machine = "/job:localhost/replica:0/task:0"
        self.worker_devices = tuple(f"{machine}/device:GPU:{i}" for i in range(number))


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    for name in (name for name in dir(machine) if name.endswith(("_devices", "_configuration"))):
        monkeypatch.setattr(tf.config, name, getattr(machine, name))
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, _: machine.grows.append(gpu.name)
    )
    monkeypatch.setattr(devices, "_memory_to_split", lambda index: SHARED)
    return machine


NAMED = [([1], "GPU:1"), ([1, 0], "GPU:0, GPU:1"), (None, "GPU:0, GPU:1")]


@pytest.mark.parametrize(("gpus", "named"), NAMED)
def test_gpus_have_their_numbers_on_the_machine(machine, gpus, named):
    configure_devices(gpus=gpus)
    replicas = Replicas(len(machine.list_logical_devices("GPU")))
    assert describe_devices(replicas) == f"{named}, OneDeviceStrategy"
    assert sorted(machine.grows) == sorted(gpu.name for gpu in machine.visible)
    assert path_of(replicas) is GPU


def test_one_gpu_is_split(machine):
    """Without memory growth, which TensorFlow refuses there, and without NCCL."""
    configure_devices(gpus=[1], num_virtual_devices=3)
    assert machine.visible == [machine.gpus[1]]
    limits = [part.memory_limit for part in machine.parts["/physical_device:GPU:1"]]
    assert limits == [SHARED // 3] * 3
    assert not machine.grows
    replicas = Replicas(2)
    assert describe_devices(replicas) == "2 of GPU:1, OneDeviceStrategy"
    assert path_of(replicas) is VIRTUAL_GPU
    assert path_of(replicas).reduces_on_one_device
    assert reduce_options().implementation.value == "RING"
