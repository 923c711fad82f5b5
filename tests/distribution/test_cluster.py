"""Which task a process is, on faked environments; and the files to copy for other platforms."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from absl import flags
from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
    SlurmClusterResolver,
)

from ddl.cli.commands import parse
from ddl.cli.flags import main_flags
from ddl.distribution.cluster import cluster_role, join_cluster, slurm_tf_config
from ddl.errors import ConfigError

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


def step(rank, nodes, tasks_per_node, node=0, job=7, **others) -> dict[str, str]:
    """What srun gives a task."""
    number = sum(
        int(part.split("(x")[0]) * int(part.rstrip(")").split("(x")[1] if "(x" in part else 1)
        for part in tasks_per_node.split(",")
    )
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_STEP_NUM_TASKS": str(number),
        **others,
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
    config = json.loads(slurm_tf_config(step(3, "gpu[09-10],big", "2(x2),1", node=1, job=3)))
    assert config == {
        "cluster": {
            "worker": ["gpu09:10048", "gpu09:10049", "gpu10:10048", "gpu10:10049", "big:10048"]
        },
        "task": {"type": "worker", "index": 3},
    }


def test_tensorflow_mixes_up_nodes_of_unpadded_numbers(environment):
    """Why its resolver is not used. If this fails it could be."""
    variables = step(0, "n[9-10]", "1(x2)")
    environment(variables)
    resolver = SlurmClusterResolver(port_base=1, gpus_per_node=1, auto_set_gpu=False)
    assert resolver.cluster_spec().as_dict() == {"worker": ["n10:1", "n9:1"]}
    workers = json.loads(slurm_tf_config(variables))["cluster"]["worker"]
    assert [worker.split(":")[0] for worker in workers] == ["n9", "n10"]


def test_jobs_that_share_a_node_have_ports_of_their_own():
    first, second = (
        json.loads(slurm_tf_config(step(0, "n", "16", job=job)))["cluster"]["worker"]
        for job in (41, 42)
    )
    assert not {*first} & {*second}
    ports = [int(worker.split(":")[1]) for worker in [*first, *second]]
    assert min(ports) >= 10000
    assert max(ports) < 32768


def test_reserved_ports_are_used():
    config = slurm_tf_config(step(1, "n", "2", SLURM_STEP_RESV_PORTS="12001-12002"))
    assert json.loads(config)["cluster"]["worker"] == ["n:12001", "n:12002"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_NODELIST": None}, "as srun .* got KeyError: 'SLURM_STEP_NODELIST'. Start"),
        ({"SLURM_STEP_NODELIST": "r[1-2]n[1-2]"}, "(?s)Invalid hostlist.*--cluster=tf_config"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "Invalid tasks-per-node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, "4 tasks with number 1 among them do not match"),
        ({"SLURM_PROCID": "9"}, "4 tasks with number 9 among them do not match"),
        ({"SLURM_NODEID": "1"}, "task 1 runs on node 1 .* node 0.*--distribution=block"),
    ],
)
def test_what_cannot_be_is_told(changes, message):
    variables = {**step(1, "n[1-2]", "2(x2)"), **changes}
    with pytest.raises(ConfigError, match=message):
        slurm_tf_config({name: value for name, value in variables.items() if value is not None})


TF_CONFIG = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}})


@pytest.mark.parametrize(
    ("name", "variables", "first_worker"),
    [
        ("auto", {}, None),
        ("auto", {"TF_CONFIG": TF_CONFIG}, "a:1"),
        ("auto", step(0, "n[1-2]", "1(x2)"), "n1:10112"),
        ("auto", {**step(0, "n[1-2]", "1(x2)"), "TF_CONFIG": TF_CONFIG}, "a:1"),
        ("slurm", {**step(0, "n[1-2]", "1(x2)"), "TF_CONFIG": TF_CONFIG}, "n1:10112"),
        # A shell by srun --pty, and a batch script, are one process.
        ("auto", step(0, "n1", "1"), None),
        ("auto", {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
        ("none", {**step(0, "n[1-2]", "1(x2)"), "TF_CONFIG": TF_CONFIG}, None),
    ],
)
def test_what_is_found(environment, name, variables, first_worker):
    environment(variables)
    join_cluster(name)
    text = os.environ.get("TF_CONFIG")
    assert (json.loads(text)["cluster"]["worker"][0] if text else None) == first_worker


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tf_config", "needs the environment variable TF_CONFIG, which is not set"),
        ("slurm", "needs the environment variables SLURM_"),
        ("k8s", "auto"),
    ],
)
def test_what_was_asked_for_is_not_there(environment, name, message):
    environment({})
    with pytest.raises(ConfigError, match=message):
        join_cluster(name)


# TF_CONFIG


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
    with pytest.raises(ConfigError, match="must name this process as one of its"):
        _ = cluster_role().worker_index


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"cluster": [1]}', '{"cluster": {"worker": 3}}', '{"task": {"index": "x"}}'),
        '{"cluster": {"worker": "localhost:1234"}}',  # a text has letters, which are no addresses
        '{"cluster": {"worker": ["localhost:65536", "localhost:2"]}}',
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
    """TensorFlow reads TF_CONFIG for mirrored, too, and raises errors of its own."""
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match="TF_CONFIG must be a JSON object in TensorFlow's form"):
        join_cluster()


@pytest.mark.parametrize("kind", ["worker", "ps"])
def test_an_index_beyond_the_list_is_refused(monkeypatch, kind):
    """Also for one worker, which trains alone, and for a server."""
    config = {"cluster": {kind: ["a:1"]}, "task": {"type": kind, "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ConfigError, match=f"one of its tasks, got type '{kind}' and index 1"):
        cluster_role()


def test_a_kind_that_the_cluster_lacks_is_refused(monkeypatch):
    """One worker would else train alone, whatever it is called; an evaluator stands outside."""
    for kind in ("wroker", "evaluator"):
        config = {"cluster": {"worker": ["a:1"]}, "task": {"type": kind, "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        if kind == "evaluator":
            assert cluster_role().kind == kind
        else:
            with pytest.raises(ConfigError, match=r"'wroker' and index 0. Did you mean worker\?"):
                cluster_role()


def test_an_index_may_be_a_text(monkeypatch):
    config = {"cluster": {"worker": ["[::1]:65535"]}, "task": {"type": "worker", "index": "0"}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert cluster_role().worker_index == 0


# The files to copy


def flags_of_main(command) -> flags.FlagValues:
    """Parses what stands after `ddl.main`, as it does."""
    values = main_flags()
    parse(values, command[command.index("ddl.main") :], "")
    return values


def program(folder, name, *lines):
    """An executable that stands in for one of the platform's."""
    path = folder / name
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)


def path_with(folder) -> str:
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [
        *((0, 0, False), (70, 0, True), (75, 0, True), (77, 3, True), (137, 0, True)),
        *((1, 0, False), (76, 0, False), (75, 20, False)),
    ],
)
def test_the_slurm_script_queues_again_what_can_go_on(tmp_path, status, restarts, again):
    program(tmp_path, "srun", f'echo "$@" > {tmp_path}/srun.txt', f"exit {status}")
    program(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/scontrol.txt')
    environment = {"PATH": path_with(tmp_path), "SLURM_JOB_ID": "7"}
    environment["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(
        ["bash", CLUSTERS / "slurm.sbatch", "--model_dir=a b"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "scontrol.txt").exists() == again
    if again:
        assert (tmp_path / "scontrol.txt").read_text().split() == ["requeue", "7"]
    command = (tmp_path / "srun.txt").read_text().strip()
    assert command.endswith("python -m ddl.main --cluster=slurm --model_dir=a b")


def test_the_tf_job(tmp_path):
    job = yaml.safe_load((CLUSTERS / "kubernetes_tfjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    assert worker["replicas"] > 1
    assert worker["restartPolicy"] == "OnFailure"
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow"
    values = flags_of_main(container["command"])
    assert values.worker_timeout > 60
    assert (CLUSTERS.parent.parent / values.gin_file[0]).exists()


@pytest.mark.parametrize("index", [0, 3])
def test_the_plain_job_makes_tf_config_of_its_number(tmp_path, index):
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes_job.yaml").read_text())
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(variables["NUM_WORKERS"]) == spec["completions"] == spec["parallelism"] == 4
    program(
        tmp_path,
        "python",
        f'printf "%s\\n" "$@" > {tmp_path}/arguments.txt',
        f'printf "%s" "$TF_CONFIG" > {tmp_path}/config.txt',
    )
    subprocess.run(
        container["command"],
        env={**variables, "PATH": path_with(tmp_path), "JOB_COMPLETION_INDEX": str(index)},
        check=True,
    )
    assert json.loads((tmp_path / "config.txt").read_text()) == {
        "cluster": {"worker": [f"ddl-{number}.ddl:2222" for number in range(4)]},
        "task": {"type": "worker", "index": index},
    }
    values = flags_of_main((tmp_path / "arguments.txt").read_text().split())
    assert values.cluster == "tf_config"
    # What would come again is not started again; what can go on is.
    rule = spec["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [1, 76]
    assert pod["restartPolicy"] == "Never"  # such a policy needs it
