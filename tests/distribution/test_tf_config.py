import json

import pytest

from ddl.distribution.tf_config import cluster_place
from ddl.errors import ConfigError


def test_no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    place = cluster_place()
    assert (place.workers, place.kind) == ([], "")
    with pytest.raises(ConfigError, match="must name this process as one of its workers"):
        _ = place.worker_index


@pytest.mark.parametrize(
    ("kind", "index", "number"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_a_chief_is_the_first_worker(monkeypatch, kind, index, number):
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"], "evaluator": ["d:1"]}
    task = {"type": kind, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    place = cluster_place()
    assert place.workers == ["a:1", "b:1", "c:1"]
    assert place.worker_index == number


@pytest.mark.parametrize("task", [{}, {"type": "ps", "index": 0}, {"type": "worker", "index": 2}])
def test_who_is_no_worker_is_told(monkeypatch, task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}, "task": task}))
    with pytest.raises(ConfigError, match="must name this process as one of its workers"):
        _ = cluster_place().worker_index


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"cluster": [1]}', '{"cluster": {"worker": 3}}', '{"task": {"index": "x"}}'],
)
def test_another_form_is_told(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match="TF_CONFIG must be a JSON object in TensorFlow's form"):
        cluster_place()
