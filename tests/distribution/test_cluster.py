"""Which task a process is, on faked environments."""

import json
import os

import pytest

from ddl.distribution.cluster import join_cluster, slurm_tf_config


def step(rank, number, nodes, tasks_per_node, node=0, job=7) -> dict[str, str]:
    """What srun gives a task of so many."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_STEP_NUM_TASKS": str(number),
    }


@pytest.fixture
def environment(monkeypatch):
    """Sets what a platform would, and nothing of another one."""

    def fake(variables):
        for name in list(os.environ):
            if name.startswith("SLURM_") or name == "TF_CONFIG":
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TF_CONFIG", variables.get("TF_CONFIG", ""))  # is set back afterwards

    return fake


def test_a_slurm_step_becomes_tf_config():
    config = json.loads(slurm_tf_config(step(3, 5, "gpu[09-10],big", "2(x2),1", node=1, job=3)))
    assert config == {
        "cluster": {
            "worker": ["gpu09:10048", "gpu09:10049", "gpu10:10048", "gpu10:10049", "big:10048"]
        },
        "task": {"type": "worker", "index": 3},
    }


TF_CONFIG = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}})


@pytest.mark.parametrize(
    ("name", "variables", "first_worker"),
    [
        ("auto", {}, None),
        ("auto", {"TF_CONFIG": TF_CONFIG}, "a:1"),
        ("auto", step(0, 2, "n[1-2]", "1(x2)"), "n1:10112"),
        ("auto", {**step(0, 2, "n[1-2]", "1(x2)"), "TF_CONFIG": TF_CONFIG}, "a:1"),
        ("slurm", {**step(0, 2, "n[1-2]", "1(x2)"), "TF_CONFIG": TF_CONFIG}, "n1:10112"),
        # A shell by srun --pty, and a batch script, are one process.
        ("auto", step(0, 1, "n1", "1"), None),
        ("auto", {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
        ("none", {**step(0, 2, "n[1-2]", "1(x2)"), "TF_CONFIG": TF_CONFIG}, None),
    ],
)
def test_what_is_found(environment, name, variables, first_worker):
    environment(variables)
    join_cluster(name)
    text = os.environ.get("TF_CONFIG")
    assert (json.loads(text)["cluster"]["worker"][0] if text else None) == first_worker
