"""Parameter servers, workers and a chief as processes, as `ddl.launch` starts them."""

import json
import os
import re
import signal
import sys
import threading
import time

import pytest

from ddl.distribution import parameter_servers
from ddl.distribution.cluster import ClusterTimeouts
from ddl.distribution.parameter_servers import serves_here
from ddl.errors import ConfigError, WorkerLost
from tests.distribution.whole_clusters import start
from tests.processes import commands
from tests.run.whole_runs import ROOT, tensors


def arguments(model_dir, *params):
    return [
        f"--gin_file={ROOT}/configs/digits_cnn.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in params),
    ]


class Launch:
    """A launcher of parameter servers and two workers, and what it has shown so far."""

    def __init__(self, model_dir, *flags, launcher=()):
        self._model_dir = model_dir
        numbers = ("--num_ps=1", "--num_workers=2")
        command = [sys.executable, "-m", "ddl.launch", *numbers, *launcher, "--", *flags]
        self.process = start(command)
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


def test_a_signal_ends_the_wait_for_the_chief_at_its_first_refusal(monkeypatch):
    """The launcher sends one when the chief has ended, and kills what does not end soon."""
    asked, signalled = [], threading.Event()
    monkeypatch.setattr(parameter_servers, "ask", lambda *given: asked.append(given) or "refuses")
    monkeypatch.setattr(parameter_servers, "_PAUSE", 0.01)
    parameter_servers._wait_for_end("a:1", ClusterTimeouts(), signalled)
    assert len(asked) == 3
    signalled.set()
    parameter_servers._wait_for_end("a:1", ClusterTimeouts(), signalled)
    assert len(asked) == 4


def test_a_chief_that_stalls_is_lost(monkeypatch):
    monkeypatch.setattr(parameter_servers, "ask", lambda *given: "is silent")
    monkeypatch.setattr(parameter_servers, "_PAUSE", 0.01)
    with pytest.raises(WorkerLost, match="The chief at a:1 is silent since 0 s. Check its log"):
        parameter_servers._wait_for_end("a:1", ClusterTimeouts(stall=0.02), threading.Event())
