"""Parameter servers, workers and a chief as processes, as `ddl.launch` starts them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution import parameter_servers
from ddl.distribution.parameter_servers import serves_here
from ddl.distribution.timeouts import ClusterTimeouts
from ddl.errors import ConfigError
from ddl.launcher.tasks import cluster_tasks, free_ports, tf_configs
from ddl.models import load_exported
from tests.processes import commands, forked
from tests.run.whole_runs import ROOT, lines, tensors


def arguments(model_dir, *params):
    return [
        f"--gin_file={ROOT}/configs/digits_cnn.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in params),
    ]


def start(*command, **environment) -> subprocess.Popen:
    return forked.Popen(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Launch:
    """A launcher of parameter servers and two workers, and what it has shown so far."""

    def __init__(self, model_dir, *flags, launcher=(), servers=1):
        self._model_dir = model_dir
        numbers = (f"--num_ps={servers}", "--num_workers=2")
        self.process = start("ddl.launch", *numbers, *launcher, "--", *flags)
        self.shown = ""

    def wait_for(self, pattern: str) -> None:
        while not re.search(pattern, self.shown):
            line = self.process.stdout.readline()
            assert line, self.shown
            self.shown += line

    def send(self, task: str, number: signal.Signals) -> None:
        os.kill(self.processes()[task], number)

    def processes(self) -> dict[str, int]:
        found = {}
        for number, (command, environment) in commands.running().items():
            task = re.search(r'"type": "(\w+)", "index": (\d+)', environment)
            is_of_run = "ddl.main" in command and f"--model_dir={self._model_dir}" in command
            if is_of_run and task:  # an evaluator beside the cluster has no task
                found[f"{task[1]} {task[2]}"] = number
        return found

    def finish(self) -> int:
        try:
            self.shown += self.process.communicate(timeout=600)[0]
        finally:
            self.process.kill()
        deadline = time.monotonic() + 60
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == {}
        return self.process.returncode


def evaluations(model_dir):
    return {x["step"]: x["accuracy"] for x in lines(model_dir) if x["split"] == "eval"}


def counts(model_dir):
    saved = tensors(model_dir)
    return [
        int(next(value for name, value in saved.items() if name.startswith(prefix)))
        for prefix in ("state/step/", "state/batches/", "optimizer/_iterations/")
    ]


@pytest.mark.slow
def test_digits_with_an_evaluator_beside_it(tmp_path):
    """One process with one device follows the run; the cluster trains and does not evaluate."""
    model_dir = tmp_path / "run"
    plan = ["TRAIN_STEPS = 500", "CHECKPOINT_EVERY = 250"]
    launch = Launch(
        model_dir, *arguments(model_dir, *plan), "--mode=train", launcher=["--grace_seconds=60"]
    )
    evaluator = start(
        "ddl.main", *arguments(model_dir, *plan), "--mode=eval", "--follow_timeout=600"
    )
    assert launch.finish() == 0, launch.shown
    assert "killed" not in launch.shown  # workers and parameter server end by themselves
    output, _ = evaluator.communicate(timeout=300)
    assert evaluator.returncode == 0, output
    assert "workers: 2, parameter servers: 1" in launch.shown
    assert "Updates are asynchronous" in launch.shown
    assert counts(model_dir) == [500, 500, 500]
    # The order of asynchronous updates is by chance: 0.983 to 0.992 on a quiet machine, and once
    # 0.958 under load.
    assert evaluations(model_dir)[500] >= 0.93
    assert {x["step"] for x in lines(model_dir) if x["split"] == "train"} == set(
        range(100, 600, 100)
    )
    assert sorted(path.name for path in (model_dir / "logs").iterdir()) == [
        "ps-0.log",
        "worker-0.log",
        "worker-1.log",
    ]

    # The same command with more steps goes on; one that loses its parameter server does so too.
    plan = ["TRAIN_STEPS = 1500", "CHECKPOINT_EVERY = 100", "EVAL_EVERY = 1500"]
    launch = Launch(model_dir, *arguments(model_dir, *plan), launcher=["--max_restarts=1"])
    launch.wait_for("Restored step 500")
    launch.wait_for("step 700")
    launch.send("ps 0", signal.SIGKILL)
    assert launch.finish() == 0, launch.shown
    # The others may have ended before the launcher looks, and then it stops none.
    assert "ps 0 was killed by SIGKILL." in launch.shown
    assert "Restart 1 of 1: all processes.\n" in launch.shown
    assert re.search(r"Restored step ([6-9]00|1,[0-4]00)", launch.shown)
    assert counts(model_dir) == [1500, 1500, 1500]
    assert evaluations(model_dir)[1500] >= 0.97


SPLIT = """
include 'standard.gin'
SEED = 0
GLOBAL_BATCH_SIZE = 32
TRAIN_STEPS = 600
EVAL_EVERY = 600
CHECKPOINT_EVERY = 100
LEARNING_RATE = 0.05
PRECISION = 'float32'
CLIP_NORM = None
ACCUMULATION_STEPS = 1
Trainer.task = @Classification()
Classification.model = @table_mlp()
table_mlp.num_outputs = 3
table_mlp.categories = {'item': 300}
table_mlp.max_table_parts = 4
table_mlp.min_table_part_bytes = 1024
Trainer.optimizer = @FusedAdagrad()
FusedAdagrad.learning_rate = @LearningRate()
LearningRate.schedule = %LEARNING_RATE
Trainer.train_data = @record_files()
Trainer.eval_data = @record_files()
record_files.features = {'item': ('item', 'int64', ()), 'label': ('label', 'int64', ())}
"""


@pytest.mark.slow
def test_a_split_table_and_record_files_go_on_after_a_server_was_killed(tmp_path):
    file, config, model_dir = tmp_path / "items", tmp_path / "config.gin", tmp_path / "run"
    config.write_text(SPLIT + f"record_files.files = {str(file)!r}\n")
    with tf.io.TFRecordWriter(str(file)) as records:
        for number in range(300):
            of = {"item": number, "label": number % 3}
            feature = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                for name, value in of.items()
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            records.write(example.SerializeToString())
    flags = [f"--gin_file={config}", f"--model_dir={model_dir}"]
    launch = Launch(model_dir, *flags, launcher=["--max_restarts=1"], servers=2)
    launch.wait_for("step 300")
    launch.send("ps 1", signal.SIGKILL)
    assert launch.finish() == 0, launch.shown
    assert re.search(r"parameter servers: 0 holds [\d.]+ MB, 1 holds [\d.]+ MB", launch.shown)
    assert "ps 1 was killed by SIGKILL." in launch.shown
    assert "Restart 1 of 1: all processes.\n" in launch.shown
    assert re.search(r"Restored step [2-5]00", launch.shown)
    assert counts(model_dir) == [600, 600, 600]
    assert evaluations(model_dir)[600] >= 0.9  # each item has one label

    # The commands of a saved run take the trained table, from another number of servers too.
    at_the_end = re.findall(r"step 600 .* eval .*\n", launch.shown)[-1]
    for servers, mode in ((1, "eval"), (2, "export")):
        launch = Launch(model_dir, *flags, f"--mode={mode}", servers=servers)
        assert launch.finish() == 0, launch.shown
        assert "Restored step 600" in launch.shown
        if mode == "eval":
            assert at_the_end in launch.shown
    exported = load_exported(model_dir / "export" / "model.keras")
    found = np.argmax(exported({"item": tf.range(300, dtype=tf.int64)}), axis=-1)
    accuracy = np.mean(found == np.arange(300) % 3)
    assert accuracy == pytest.approx(evaluations(model_dir)[600], abs=1e-6)


@pytest.mark.slow
def test_a_killed_worker_is_started_again_alone_and_all_stop_after_saving(tmp_path):
    model_dir = tmp_path / "run"
    plan = ["TRAIN_STEPS = 1000000", "EVAL_EVERY = 1000000", "CHECKPOINT_EVERY = 1000000"]
    launch = Launch(model_dir, *arguments(model_dir, *plan), launcher=["--max_restarts=1"])
    launch.wait_for("step 100 ")
    others = {**launch.processes()}
    launch.send("worker 1", signal.SIGKILL)
    launch.wait_for("worker 1 was killed by SIGKILL. The launcher restarts it alone.")
    launch.wait_for("The other workers compute its updates until it is back")
    launch.wait_for(r"Worker 1 at \S+ is back\.\n(.*\n)*step ")
    now = launch.processes()
    assert now.pop("worker 1") != others.pop("worker 1")
    assert now == others
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish() == 75, launch.shown
    step, batches, iterations = counts(model_dir)
    assert (
        f"Training stopped on SIGTERM at step {step:,} of 1,000,000, after saving" in launch.shown
    )
    assert step == iterations
    assert batches - step in (0, 1)  # what the dead worker had begun with


@pytest.mark.slow
def test_a_worker_that_is_stopped_ends_all(tmp_path):
    model_dir = tmp_path / "run"
    flags = [*arguments(model_dir, "TRAIN_STEPS = 1000000"), "--stall_timeout=8"]
    launch = Launch(model_dir, *flags, launcher=["--grace_seconds=1"])
    launch.wait_for("step 100 ")
    launch.send("worker 1", signal.SIGSTOP)
    assert launch.finish() == 77, launch.shown
    assert re.search(r"Worker 1 at \S+ has not answered for \d+ s", launch.shown)


def test_those_that_nobody_joins_end_soon(tmp_path):
    tasks = cluster_tasks(1, num_ps=1)
    configs = tf_configs(tasks, free_ports(len(tasks)))
    flags = [*arguments(tmp_path / "run"), "--strategy=parameter_server", "--join_timeout=1"]
    started = [start("ddl.main", *flags, TF_CONFIG=config) for config in configs[:2]]
    for process, who in zip(started, ("Parameter server 0", "The chief"), strict=True):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 77, output
        assert f"ddl: {who} at 127.0.0.1:" in output
        assert "did not join within" in output
    assert not (tmp_path / "run").exists()


class Ended(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "answers", "told"),
    [
        (
            "worker",
            ["greets", "refuses", "refuses", "greets"],
            ["Worker 0 at a:1 is lost.", "is back."],
        ),
        ("worker", ["greets", "is silent"], ["Worker 0 at a:1 has not answered for 51 s"]),
        ("worker", ["greets", "is unreachable"], ["Worker 0 at a:1 has been unreachable for 31 s"]),
        (
            "ps",
            ["greets", "refuses"],
            ["Parameter server 0 at a:1 has refused connections for 6 s"],
        ),
        ("ps", ["greets", "is silent", "greets"], []),
    ],
)
def test_who_is_missed(monkeypatch, capsys, kind, answers, told):
    """Two workers; the last answer stays. Each look takes a second."""
    clock, script = [0.0], iter(answers)
    last = answers[-1]

    def look(seconds):
        clock[0] += seconds
        if clock[0] > 60:
            raise Ended

    def end(why):
        print(why, file=sys.stderr)
        raise Ended

    monkeypatch.setattr(parameter_servers, "ask", lambda *arguments: next(script, last))
    monkeypatch.setattr(parameter_servers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(parameter_servers.time, "sleep", look)
    monkeypatch.setattr(parameter_servers, "_end", end)
    with pytest.raises(Ended):
        parameter_servers._Watch(2, ClusterTimeouts(peer=30, stall=50))._watch(kind, 0, "a:1")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, text in zip(lines, told, strict=True):
        assert text in line


def test_no_worker_left_ends_all(monkeypatch):
    ended = []
    watch = parameter_servers._Watch(1, ClusterTimeouts(peer=1e-9, stall=1e-9))
    monkeypatch.setattr(parameter_servers, "ask", lambda *arguments: "refuses")
    monkeypatch.setattr(parameter_servers, "_PAUSE", 0.01)

    def end(why):
        ended.append(why)
        raise Ended

    monkeypatch.setattr(parameter_servers, "_end", end)
    with pytest.raises(Ended):
        watch._watch("worker", 0, "a:1")
    assert "Worker 0 at a:1 has refused connections" in ended[0]


@pytest.mark.parametrize("cluster", [{}, {"worker": ["a:1", "b:1"]}, {"chief": ["a:1"]}])
def test_a_cluster_without_parameter_servers_is_refused(monkeypatch, cluster):
    kind = next(iter(cluster), None)
    config = {"cluster": cluster, "task": {"type": kind, "index": 0}} if cluster else {}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ConfigError, match=r"chief, workers\s+and parameter servers"):
        serves_here()


@pytest.mark.parametrize(("kind", "serves"), [("chief", False), ("worker", True), ("ps", True)])
def test_who_serves(monkeypatch, kind, serves):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    task = {"type": kind, "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    assert serves_here() is serves


def test_a_signal_ends_the_pause_between_two_looks_at_the_chief(monkeypatch):
    """The launcher sends one when the chief has ended, and kills what does not end soon."""
    waited = []

    def receive(seconds):
        waited.append(seconds)
        signals.append(signal.SIGTERM)

    signals: list[int] = []
    monkeypatch.setattr(parameter_servers.time, "monotonic", lambda: sum(waited))
    monkeypatch.setattr(parameter_servers.time, "sleep", receive)
    monkeypatch.setattr(parameter_servers, "ask", lambda *arguments: "refuses")
    parameter_servers._wait_for_end_of_chief("a:1", ClusterTimeouts(), signals)
    assert sum(waited) < 0.1
