"""What a run sets before TensorFlow is imported."""

import json
import os

import pytest

from ddl.cli.placing import return_freed_memory_of_server

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
