import json

import pytest

from ddl.distribution.tf_config import cluster_role
from ddl.errors import ConfigError


def test_no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    role = cluster_role()
    assert (role.workers, role.kind) == ([], "")
    with pytest.raises(ConfigError, match="must name this process as one of its workers"):
        _ = role.worker_index


@pytest.mark.parametrize(
    ("kind", "index", "number"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_a_chief_is_the_first_worker(monkeypatch, kind, index, number):
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"], "evaluator": ["d:1"]}
    task = {"type": kind, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    role = cluster_role()
    assert role.workers == ["a:1", "b:1", "c:1"]
    assert role.worker_index == number


@pytest.mark.parametrize("task", [{}, {"type": "ps", "index": 0}, {"type": "worker", "index": 2}])
def test_who_is_no_worker_is_told(monkeypatch, task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}, "task": task}))
    with pytest.raises(ConfigError, match="must name this process as one of its workers"):
        _ = cluster_role().worker_index


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"cluster": [1]}', '{"cluster": {"worker": 3}}', '{"task": {"index": "x"}}'],
)
def test_another_form_is_told(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match="TF_CONFIG must be a JSON object in TensorFlow's form"):
        cluster_role()
