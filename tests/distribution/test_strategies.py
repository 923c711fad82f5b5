"""Strategies over the virtual devices of this process, and what the environment chooses."""

import json

import pytest

from ddl.distribution.strategies import build_strategy, choose_strategy
from ddl.errors import ConfigError, DeviceError


def test_auto_takes_parameter_servers_that_tf_config_names(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    assert choose_strategy("auto") == "parameter_server"
    assert choose_strategy("mirrored") == "mirrored"


def test_auto_follows_tf_config(monkeypatch):
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ConfigError, match="TF_CONFIG must name this process as one of its workers"):
        build_strategy("auto")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "found no TPU 'local'"),
        ("grpc://127.0.0.1:1", "TimeoutError: 127.0.0.1:1 did not answer within 10 s"),
        ("of-the-cloud", "found no TPU 'of-the-cloud'.* set TPU_NAME to its address"),
    ],
)
def test_without_a_tpu(monkeypatch, name, message):
    """With one nothing has been run."""
    monkeypatch.setenv("TPU_NAME", name)
    with pytest.raises(DeviceError, match=message):
        build_strategy("tpu")
