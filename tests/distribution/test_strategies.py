"""Strategies over the virtual devices of this process, and what the environment chooses."""

import json

import pytest

from ddl.distribution.strategies import build_strategy
from ddl.errors import ConfigError


def test_auto_follows_tf_config(monkeypatch):
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ConfigError, match="TF_CONFIG must name this process as one of its workers"):
        build_strategy("auto")
