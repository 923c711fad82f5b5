"""Clusters of real processes, as `ddl.launch` starts them."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.contract.builders import make_trainer
from tests.contract.noisy_task import NoisyTask, few_examples
from tests.processes import forked

pytestmark = pytest.mark.processes

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
DISTURBED = ("noisy.gin", "disturbed.gin")


def flags_of(folder, *files):
    """Returns the flags of a run in a folder, where its callbacks have their files."""
    flags = [f"--model_dir={folder / 'run'}", *(f"--gin_file={HERE / file}" for file in files)]
    if "disturbed.gin" in files:
        flags += [f"--gin_param=DieOnce.file = '{folder / 'death'}'"]
        flags += [f"--gin_param=KeepWeights.file = '{folder / 'weights.npz'}'"]
    return flags


def launch(folder, files, *flags):
    """Runs a cluster to its end and returns its status, with all that it wrote."""
    command = [sys.executable, "-m", "ddl.launch", *flags, "--", *flags_of(folder, *files)]
    ended = forked.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    logs = (log.read_text() for log in (folder / "run/logs").glob("*"))
    return ended.returncode, "".join([ended.stdout, ended.stderr, *logs])


def evaluations(folder):
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["split"] == "eval"}


@pytest.fixture(scope="module")
def in_one_process():
    """Weights and loss of the run in this process, on one device and on two."""
    ends, data = [], few_examples()
    for where in (("one_device", 1), ("mirrored", 2)):
        make = (NoisyTask, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
        options = {"eval_data": data, "shuffle": True, "seed": 0, "clip_norm": 0.5}
        trainer = make_trainer(make, data, where, **options)
        trainer.train(12, progress=False)
        ends.append((trainer.model.get_weights(), trainer.evaluate()["loss"]))
    return ends


def test_two_workers_end_with_the_weights_of_one_process(in_one_process, tmp_path):
    """One is killed in the second of two epochs, and the launcher starts both again."""
    (tmp_path / "death").touch()
    status, output = launch(tmp_path, DISTURBED, "--num_workers=2", "--max_restarts=1")
    assert status == 0, output
    assert (tmp_path / "death").read_text() == "died"
    assert "worker 1" in output
    assert "SIGKILL" in output
    with np.load(tmp_path / "weights.npz") as found:
        found = list(found.values())
    for wanted, loss in in_one_process:
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
        assert evaluations(tmp_path)[12] == pytest.approx(loss, rel=1e-10)


def test_a_worker_that_lost_another_names_it_and_ends_with_status_77(tmp_path):
    """Without a launcher: each process reads its place from TF_CONFIG."""
    (tmp_path / "death").touch()
    command = [sys.executable, "-m", "ddl.main", *flags_of(tmp_path, *DISTURBED)]
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
    started = []
    for index in range(2):
        place = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(place)}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(forked.Popen(command, cwd=ROOT, env=environment, **options))
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == -signal.SIGKILL, outputs[1]
    assert started[0].returncode == 77, outputs[0]
    assert "worker 1" in outputs[0].lower()


def test_a_parameter_server_trains_and_evaluates(tmp_path):
    """Asynchronously, so that the weights are not those of one process."""
    status, output = launch(tmp_path, DISTURBED[:1], "--num_workers=2", "--num_ps=1")
    assert status == 0, output
    losses = evaluations(tmp_path)
    assert sorted(losses) == [6, 12]
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses[6] != losses[12]
