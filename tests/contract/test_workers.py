"""Clusters of real processes, as `ddl.launch` starts them."""

import math
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import ddl
from tests.contract.builders import make_trainer
from tests.contract.commands import lines
from tests.contract.noisy_task import NoisyTask, few_examples
from tests.distribution.whole_clusters import finish_all, free_addresses, start_worker
from tests.processes import forked

pytestmark = pytest.mark.processes

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
DISTURBED = ("noisy.gin", "disturbed.gin")


def flags_of(folder, *files):
    """Returns the flags of a run in a folder, where its callbacks have their files."""
    flags = [f"--model_dir={folder / 'run'}", *(f"--gin_file={HERE / file}" for file in files)]
    if "disturbed.gin" in files:
        flags += [f"--gin_param=DieOnce.file = '{folder / 'death'}'"]
    return flags


def launch(folder, files, *flags):
    """Runs a cluster to its end and returns its status, with all that it wrote."""
    command = [sys.executable, "-m", "ddl.launch", *flags, "--", *flags_of(folder, *files)]
    ended = forked.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    logs = (log.read_text() for log in (folder / "run/logs").glob("*"))
    return ended.returncode, "".join([ended.stdout, ended.stderr, *logs])


def evaluations(folder):
    return {line["step"]: line["loss"] for line in lines(folder / "run", "eval")}


def test_two_workers_end_with_the_weights_of_one_process(tmp_path):
    """One is killed in the second of two epochs, and the launcher starts both again."""
    (tmp_path / "death").touch()
    status, output = launch(tmp_path, DISTURBED, "--num_workers=2", "--max_restarts=1")
    assert status == 0, output
    assert (tmp_path / "death").read_text() == "died"
    assert "worker 1" in output
    assert "SIGKILL" in output
    make, data = (NoisyTask, lambda: keras.optimizers.SGD(0.1, momentum=0.9)), few_examples()
    options = {"eval_data": data, "shuffle": True, "seed": 0, "clip_norm": 0.5}
    trainer = make_trainer(make, data, ("one_device", 1), **options)
    trainer.train(12, progress=False)
    assert evaluations(tmp_path)[12] == pytest.approx(trainer.evaluate()["loss"], rel=1e-10)
    wanted, found = trainer.model.get_weights(), ddl.load(tmp_path / "run").model.get_weights()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_a_worker_that_lost_another_names_it_and_ends_with_status_77(tmp_path):
    """Without a launcher: each process reads its place from TF_CONFIG."""
    (tmp_path / "death").touch()
    hosts, flags = free_addresses(2), flags_of(tmp_path, *DISTURBED)
    (lost, output), (died, _) = finish_all([start_worker(n, hosts, *flags) for n in range(2)])
    assert (lost, died) == (77, -signal.SIGKILL), output
    assert "worker 1" in output.lower()


def test_a_parameter_server_trains_and_evaluates(tmp_path):
    """Asynchronously, so that the weights are not those of one process."""
    status, output = launch(tmp_path, DISTURBED[:1], "--num_workers=2", "--num_ps=1")
    assert status == 0, output
    losses = evaluations(tmp_path)
    assert sorted(losses) == [6, 12]
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses[6] != losses[12]
