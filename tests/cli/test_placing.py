"""What a run sets before TensorFlow is imported."""

import gc
import json
import os
from types import SimpleNamespace

import pytest

from ddl.cli.placing import build_placement, return_freed_memory_of_server
from ddl.errors import ConfigError

CLUSTER = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("ps", None, "0"), ("ps", "1", "1"), ("worker", None, None), (None, None, None)],
)
def test_a_server_alone_does_without_onednn(monkeypatch, kind, before, after):
    found = {} if before is None else {"TF_ENABLE_ONEDNN_OPTS": before}
    if kind:
        found["TF_CONFIG"] = json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": 0}})
    monkeypatch.setattr(os, "environ", found)
    return_freed_memory_of_server()
    assert found.get("TF_ENABLE_ONEDNN_OPTS") == after


def test_an_error_of_the_config_leaves_garbage_collection_as_it_was():
    before = gc.get_threshold()
    values = SimpleNamespace(cluster="none", gin_file=["none.gin"], gin_param=["="])
    values.gin_search_path = values.gin_allow_unused = None
    with pytest.raises(ConfigError, match="none.gin"):
        build_placement(values)
    assert gc.get_threshold() == before
