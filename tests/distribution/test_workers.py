"""Several real workers on this machine, as `ddl.launch` starts them."""

import gc
import os
import re
import signal
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution import multi_worker, workers
from ddl.errors import ConfigError, ModelDirectoryError, WorkerLost
from tests.distribution.whole_clusters import (
    addresses,
    arguments,
    assert_none_left,
    finish,
    finish_all,
    launch,
    processes_of,
    start_worker,
)
from tests.processes import forked
from tests.run.whole_runs import ROOT


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one process and one device train, in float64."""
    model_dir = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "ddl.main", "--strategy=one_device"]
    done = forked.run(
        [*command, *arguments(model_dir, "PRECISION = 'float64'")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return model_dir


@pytest.mark.processes
def test_workers_agree_on_the_step_at_which_they_stop(tmp_path):
    """One of them is asked; all save and end at the same step, with 75."""
    model_dir = tmp_path / "run"
    seldom = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000", "CHECKPOINT_EVERY = 100000"]
    process = launch(2, *arguments(model_dir, *seldom))
    while not process.stdout.readline().startswith("step 20 "):
        assert process.poll() is None
    os.kill(processes_of(model_dir)[1], signal.SIGTERM)
    status, output = finish(process)
    assert status == 75, output
    saved = tf.train.latest_checkpoint(str(model_dir / "checkpoints"))
    step = f"at step {int(saved.rpartition('-')[2]):,} of 100,000, after saving"
    assert step in output
    assert re.search(rf"^\[worker 1\] .*Training stopped on SIGTERM {step}", output, re.M)
    assert_none_left(model_dir)


# A task whose loss is infinite on one replica of the second worker alone.
OVERFLOWS = """
import ddl, gin, numpy as np, tensorflow as tf

@gin.register
class Overflowing(ddl.Classification):
    def per_example(self, features, training):
        output = super().per_example(features, training)
        if not training:
            return output
        here = tf.distribute.get_replica_context().replica_id_in_sync_group
        return output._replace(loss=tf.where(tf.equal(here, 3), np.inf, 1.0) * output.loss)
"""


@pytest.mark.processes
def test_workers_that_differ_are_refused_with_the_differences(tmp_path):
    model_dir = tmp_path / "run"
    hosts = addresses(2)
    other = "import ddl; ddl.__version__ = '9'; import ddl.main; ddl.main.run()"
    given = arguments(model_dir, config="digits_mlp.gin")
    workers = [
        start_worker(0, hosts, *given),
        start_worker(
            *(1, hosts, *given, "--gin_param=LEARNING_RATE = 0.5", "--gin_param=SEED = 3"),
            program=("-c", other),
        ),
    ]
    for status, output in finish_all(workers):
        assert status == 1, output
        assert "Worker 1 must have the code, versions, config and flags of worker 0, got" in output
        told = [
            line.split(", code")[0].strip() for line in output.splitlines() if "  worker" in line
        ]
        assert {line for line in told if line.startswith("worker 1: ")} == {
            *("worker 1: ddl 9", "worker 1: LEARNING_RATE = 0.5", "worker 1: SEED = 3"),
        }
        assert {line.split(" = ")[0] for line in told if line.startswith("worker 0: ")} == {
            *("worker 0: ddl 0.1.0", "worker 0: LEARNING_RATE", "worker 0: SEED"),
        }
    assert not list(model_dir.glob("*"))
    assert_none_left(model_dir)


class Watch:
    """A watch that knows of this loss."""

    def __init__(self, loss):
        self.loss = lambda wait: loss


@pytest.mark.parametrize(
    ("error", "loss", "raised", "told"),
    [
        (tf.errors.InternalError, None, tf.errors.InternalError, "a kernel failed"),
        (tf.errors.InternalError, "worker 1 died", WorkerLost, "worker 1 died"),
        (tf.errors.AbortedError, None, WorkerLost, "AbortedError: a kernel failed"),
        (tf.errors.InvalidArgumentError, "worker 1 died", tf.errors.InvalidArgumentError, "kernel"),
    ],
)
def test_a_workers_own_error_is_not_taken_for_anothers(monkeypatch, error, loss, raised, told):
    monkeypatch.setattr(multi_worker, "_PEERS", [Watch(loss)])
    where = "Graph execution error:\n\nDetected at node X (most recent call last):\n  File a\n"
    with pytest.raises(raised, match=told), multi_worker.worker_errors():
        raise error(None, None, f"{where}a kernel failed\nsomewhere")


@pytest.mark.parametrize("fails_elsewhere", [False, True])
def test_a_failure_of_one_is_a_failure_of_all(monkeypatch, fails_elsewhere):
    two = workers.Workers(tf.distribute.get_strategy())
    monkeypatch.setattr(two, "gather", lambda own: np.array([own, [float(fails_elsewhere)]]))
    with pytest.raises(ConfigError, match="here"), two.failing_together():
        raise ConfigError("here")
    if fails_elsewhere:
        with (
            pytest.raises(ModelDirectoryError, match=r"output of worker 1 shows .* start all work"),
            two.failing_together(),
        ):
            pass
    else:
        with two.failing_together():
            pass


def test_all_have_the_result_before_one_ends_with_an_error(monkeypatch):
    two = workers.Workers(tf.distribute.get_strategy())
    totals = []

    def total(values):
        totals.append(list(values))
        if len(totals) == 2:  # another worker is past the barrier and has ended
            raise tf.errors.UnavailableError(None, None, "aborted")
        return np.asarray(values)

    monkeypatch.setattr(two, "_total", total)
    with pytest.raises(ConfigError, match="here"), two.failing_together():
        raise ConfigError("here")
    assert totals == [[1.0], [0.0]]


def test_a_strategy_that_nobody_holds_is_freed():
    """One function for each strategy adds over the replicas; it must not keep the strategy."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    function = workers._summing_of(strategy)
    assert workers._summing_of(strategy) is function
    freed = weakref.ref(strategy)
    del strategy, function
    gc.collect()
    assert freed() is None
