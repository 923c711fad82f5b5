"""Parameter servers, workers and a chief as processes, as `ddl.launch` starts them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ddl.distribution import parameter_servers
from ddl.distribution.cluster import ClusterTimeouts
from ddl.distribution.parameter_servers import serves_here
from ddl.errors import ConfigError
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


@pytest.mark.processes
def test_a_killed_worker_is_started_again_alone_and_all_stop_after_saving(tmp_path):
    model_dir = tmp_path / "run"
    plan = ["TRAIN_STEPS = 1000000", "EVAL_EVERY = 1000000", "CHECKPOINT_EVERY = 1000000"]
    launch = Launch(model_dir, *arguments(model_dir, *plan), launcher=["--max_restarts=1"])
    launch.wait_for("step 100 ")
    others = {**launch.processes()}
    launch.send("worker 1", signal.SIGKILL)
    launch.wait_for("worker 1 was killed by SIGKILL")
    launch.wait_for("Restart 1 of 1: worker 1 alone.")
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
