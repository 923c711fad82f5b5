"""Strategies over the virtual devices of this process, and device set-up in one of its own."""

import json

import pytest
import tensorflow as tf

from ddl.distribution.communication import Communication
from ddl.distribution.devices import configure_devices, describe_devices
from ddl.distribution.strategies import build_strategy, choose_strategy
from ddl.errors import ConfigError, DeviceError
from tests.conftest import make_strategy


def test_auto_is_one_device_without_gpus():
    strategy = build_strategy("auto")
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    assert strategy.num_replicas_in_sync == 1


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_every_device_is_a_replica(name):
    assert build_strategy(name).num_replicas_in_sync == 4


@pytest.mark.parametrize("ops", ["auto", "hierarchical_copy", "reduction_to_one_device"])
def test_cross_device_ops(ops):
    strategy = build_strategy("mirrored", Communication(cross_device_ops=ops))
    values = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 1)
    assert int(strategy.reduce("SUM", values, axis=None)) == 10


def test_auto_takes_parameter_servers_that_tf_config_names(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    assert choose_strategy("auto") == "parameter_server"
    assert choose_strategy("mirrored") == "mirrored"


def test_parameter_servers_need_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(
        ConfigError, match="parameter_server needs the environment variable TF_CONF"
    ):
        build_strategy("parameter_server")


def test_auto_follows_tf_config(monkeypatch):
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ConfigError, match="TF_CONFIG must name this process as one of its workers"):
        build_strategy("auto")


def test_several_workers_need_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="needs the environment variable TF_CONFIG"):
        build_strategy("multi_worker_mirrored")


def test_a_broken_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{worker")
    with pytest.raises(ConfigError, match="TF_CONFIG must be a JSON object"):
        build_strategy("auto")


def test_unknown_names():
    with pytest.raises(ConfigError, match="'mirrored', .*got 'miror'"):
        build_strategy("miror")
    with pytest.raises(ConfigError, match="'nccl'.*got 'ncl'"):
        Communication(cross_device_ops="ncl")


@pytest.mark.parametrize("name", ["auto", "ring"])
def test_collectives_are_carried_out_as_asked_for(name):
    options = Communication(collectives=name, bytes_per_pack=5).options()
    assert (options.implementation.value, options.bytes_per_pack) == (name.upper(), 5)


def test_nccl_collectives_need_gpus():
    with pytest.raises(ConfigError, match="collectives = 'nccl' needs .* Set it to 'auto'"):
        Communication(collectives="nccl").options()


def test_nccl_needs_gpus():
    with pytest.raises(
        ConfigError, match="cross_device_ops.* = 'nccl' needs .* not on GPUs of their own. Set it"
    ):
        build_strategy("mirrored", Communication(cross_device_ops="nccl"))


def test_a_gpu_that_is_not_there():
    with pytest.raises(DeviceError, match=r"GPU 7 is requested.*sees 0"):
        configure_devices(gpus=[7])


@pytest.mark.parametrize("count", [2, 8])
def test_another_number_of_virtual_devices_after_the_start(count):
    tf.config.list_logical_devices()
    with pytest.raises(DeviceError, match=f"{count} virtual devices.*already started with 4"):
        configure_devices(num_virtual_devices=count)


def test_the_same_number_after_the_start_is_fine():
    tf.config.list_logical_devices()
    configure_devices(num_virtual_devices=4)


def test_description_tells_virtual_devices():
    assert describe_devices(make_strategy("mirrored", 2)) == "2 of 4 virtual CPU devices"
