import json

import pytest

from ddl.distribution.cluster import cluster_role, join_cluster
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
    [
        *("{", "[]", '{"cluster": [1]}', '{"cluster": {"worker": 3}}', '{"task": {"index": "x"}}'),
        '{"cluster": {"worker": "localhost:1234"}}',  # a text has letters, which are no addresses
        '{"cluster": {"worker": ["localhost:99999999", "localhost:2"]}}',
        '{"cluster": {"worker": [1, null]}}',
        '{"cluster": {"worker": ["localhost", "localhost:2"]}}',
        '{"cluster": {"worker": ["localhost:1", " localhost:2"]}}',
        '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["a:1"]}}',
        '{"cluster": {"chief": ["a:1", "b:1"], "worker": ["c:1"]}}',
        *('{"cluster": {"ps": ["a:0"]}}', '{"cluster": {"ps": [":1"]}}'),
        *('{"task": "worker"}', '{"task": {"type": 1}}', '{"task": {"index": -1}}'),
        *('{"task": {"index": true}}', '{"task": {"index": 0.5}}', "[" * 100_000),
    ],
)
def test_another_form_is_told(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match="TF_CONFIG must be a JSON object in TensorFlow's form"):
        cluster_role()


@pytest.mark.parametrize(("kind", "names"), [("worker", "workers"), ("ps", "parameter servers")])
def test_an_index_beyond_the_list_is_refused(monkeypatch, kind, names):
    """Also for one worker, which trains alone, and for a server."""
    config = {"cluster": {kind: ["a:1"]}, "task": {"type": kind, "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ConfigError, match=f"must name this process as one of its {names}"):
        cluster_role()


def test_a_kind_that_the_cluster_lacks_is_refused(monkeypatch):
    """One worker would else train alone, whatever it is called; an evaluator stands outside."""
    for kind in ("wroker", "evaluator"):
        config = {"cluster": {"worker": ["a:1"]}, "task": {"type": kind, "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        if kind == "evaluator":
            assert cluster_role().kind == kind
        else:
            with pytest.raises(ConfigError, match=r"got type 'wroker'. Did you mean worker\?"):
                cluster_role()


def test_a_strategy_of_one_process_needs_the_form_too(monkeypatch):
    """TensorFlow reads TF_CONFIG for a mirrored strategy, and raises errors of its own."""
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": "localhost:1234"}}')
    with pytest.raises(ConfigError, match="in TensorFlow's form"):
        join_cluster()


def test_an_index_may_be_a_text(monkeypatch):
    config = {"cluster": {"worker": ["[::1]:65535"]}, "task": {"type": "worker", "index": "0"}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert cluster_role().worker_index == 0
