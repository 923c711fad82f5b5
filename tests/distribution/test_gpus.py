"""The choice and the splitting of GPUs, on a machine that pretends to have two of 8 GiB."""

import pytest
import tensorflow as tf

from ddl.distribution import devices
from ddl.distribution.communication import Communication, cross_device_ops
from ddl.distribution.devices import configure_devices, describe_devices
from ddl.distribution.path import GPU, VIRTUAL_GPU, path_of
from ddl.errors import ConfigError, DeviceError

MEMORY = 8192


class Machine:
    """TensorFlow's settings of devices, before it has started."""

    def __init__(self) -> None:
        self.gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in (0, 1)]
        self.visible = list(self.gpus)
        self.parts: dict[str, list] = {}
        self.grows: list[str] = []

    def list_physical_devices(self, kind):
        return self.gpus

    def get_visible_devices(self, kind):
        return self.visible

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
        self.worker_devices = tuple(
            f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(number)
        )


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    for name in (name for name in dir(machine) if name.endswith(("_devices", "_configuration"))):
        monkeypatch.setattr(tf.config, name, getattr(machine, name))
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, _: machine.grows.append(gpu.name)
    )
    monkeypatch.setattr(devices, "_memory_of_gpu", lambda index: MEMORY)
    return machine


@pytest.mark.parametrize(
    ("gpus", "described"), [([1], "GPU:1"), ([1, 0], "GPU:0, GPU:1"), (None, "GPU:0, GPU:1")]
)
def test_gpus_have_their_numbers_on_the_machine(machine, gpus, described):
    configure_devices(gpus=gpus)
    replicas = Replicas(len(machine.list_logical_devices("GPU")))
    assert describe_devices(replicas) == described
    assert sorted(machine.grows) == sorted(gpu.name for gpu in machine.visible)
    assert path_of(replicas) is GPU


@pytest.mark.parametrize(("memory", "limit"), [(None, int(MEMORY * 0.85) // 3), (2000, 2000)])
def test_one_gpu_is_split(machine, memory, limit):
    """Without memory growth, which TensorFlow refuses there, and without NCCL."""
    configure_devices(gpus=[1], num_virtual_devices=3, virtual_gpu_memory=memory)
    assert machine.visible == [machine.gpus[1]]
    assert [part.memory_limit for part in machine.parts["/physical_device:GPU:1"]] == [limit] * 3
    assert not machine.grows
    replicas = Replicas(2)
    assert describe_devices(replicas) == "2 of 3 virtual devices of GPU:1"
    path = path_of(replicas)
    assert path is VIRTUAL_GPU
    assert isinstance(cross_device_ops(Communication(), path), tf.distribute.ReductionToOneDevice)
    assert Communication().options().implementation.value == "RING"
    with pytest.raises(ConfigError, match="cross_device_ops.* 'nccl'.*not on GPUs of their own"):
        cross_device_ops(Communication("nccl"), path)
    with pytest.raises(ConfigError, match="collectives.* = 'nccl'.*the GPUs are virtual"):
        Communication(collectives="nccl").options()


def test_without_gpus_named_the_cpu_is_split(machine, monkeypatch):
    split = []
    monkeypatch.setattr(devices, "_split_host_cpu", split.append)
    for gpus in (None, []):
        configure_devices(gpus=gpus, num_virtual_devices=2)
    assert split == [2, 2]
    assert not machine.parts


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"gpus": [0, 7]}, DeviceError, r"GPU 7 is requested.*sees 2.*available: 0, 1"),
        ({"gpus": [7], "num_virtual_devices": 2}, DeviceError, r"GPU 7 is .*available: 0, 1"),
        ({"gpus": [0, 1, 0]}, ConfigError, "name each GPU once, got 0, 1, 0. Remove the second 0"),
        ({"gpus": [0, 0], "num_virtual_devices": 2}, ConfigError, "name each GPU once"),
        ({"gpus": [0, 1], "num_virtual_devices": 2}, ConfigError, "splits one GPU.*GPUs 0, 1"),
        (
            {"gpus": [0], "num_virtual_devices": 3, "virtual_gpu_memory": 3000},
            DeviceError,
            "3 virtual GPUs of 3,000 MiB need 9,000 MiB, but GPU 0 has 8,192 MiB",
        ),
        ({"gpus": [0], "virtual_gpu_memory": 100}, ConfigError, "no GPU is split"),
        ({"num_virtual_devices": 2, "virtual_gpu_memory": 100}, ConfigError, "no GPU is split"),
        (
            {"gpus": [0], "num_virtual_devices": 2, "virtual_gpu_memory": 0},
            ConfigError,
            "at least 1 MiB, got 0",
        ),
    ],
)
def test_errors_change_nothing(machine, arguments, error, told):
    with pytest.raises(error, match=told):
        configure_devices(**arguments)
    assert machine.visible == machine.gpus
    assert not machine.parts


def test_a_driver_that_does_not_tell_the_memory(machine, monkeypatch):
    monkeypatch.setattr(devices, "_memory_of_gpu", lambda index: None)
    with pytest.raises(DeviceError, match="memory of GPU 0 could not be read.*virtual_gpu_memory"):
        configure_devices(gpus=[0], num_virtual_devices=2)
    configure_devices(gpus=[0], num_virtual_devices=2, virtual_gpu_memory=100)
    assert len(machine.list_logical_devices("GPU")) == 2


@pytest.mark.parametrize(("count", "error"), [(2, None), (3, "3 virtual GPUs.*started with 2")])
def test_after_tensorflow_has_started(machine, monkeypatch, count, error):
    def refuse(*_):
        raise RuntimeError("Virtual devices cannot be modified after being initialized")

    configure_devices(gpus=[0], num_virtual_devices=2)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", refuse)
    if error is None:
        configure_devices(gpus=[0], num_virtual_devices=count)
    else:
        with pytest.raises(DeviceError, match=error):
            configure_devices(gpus=[0], num_virtual_devices=count)


def test_no_gpu_has_no_memory():
    """On this machine there is no driver, or the GPU that it names is not there."""
    assert devices._memory_of_gpu(10_000) is None
