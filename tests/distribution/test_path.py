"""The path of each kind of device."""

from unittest import mock

import pytest
import tensorflow as tf

from ddl.distribution.path import CPU, GPU, TPU, path_for, path_of, taking
from tests.conftest import make_strategy


@pytest.mark.parametrize(
    ("devices", "path"),
    [
        (["CPU:0", "CPU:1"], CPU),
        (["/job:localhost/replica:0/task:0/device:GPU:1"], GPU),
        (["/job:localhost/replica:0/task:0/device:TPU:0"], TPU),
    ],
)
def test_devices_decide(devices, path):
    assert path_for(devices) == path


def test_a_path_can_be_taken_for_a_while():
    strategy = make_strategy("mirrored", 2)
    with taking(GPU):
        assert path_of() == path_of(strategy) == GPU
    assert path_of() == path_of(strategy) == CPU


@pytest.mark.parametrize("has_servers", [True, False])
def test_variables_on_several_servers_are_not_packed_and_change_at_once(has_servers):
    strategy = mock.Mock(spec=tf.distribute.Strategy)
    devices = ["/device:GPU:0"]
    strategy._should_use_with_coordinator = has_servers
    strategy.extended = mock.Mock(worker_devices=devices)
    assert path_of(strategy).sums_on_devices != has_servers
    devices[:] = ["/device:CPU:0"]
    assert path_of(strategy).subtracts_at_once == has_servers
