"""Several real workers on this machine, as `ddl.launch` starts them."""

import gc
import os
import re
import signal
import weakref

import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution import workers
from ddl.errors import ConfigError, DdlError
from tests.distribution.whole_clusters import (
    arguments,
    assert_none_left,
    finish,
    finish_all,
    free_addresses,
    launch,
    processes_of,
    start_worker,
)


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


@pytest.mark.processes
def test_a_worker_that_never_comes(tmp_path):
    """Without a launcher: the others end in time, and name it."""
    model_dir, hosts = tmp_path / "run", free_addresses(3)
    flags = [*arguments(model_dir), "--worker_timeout=3"]
    ended = finish_all([start_worker(index, hosts, *flags) for index in range(2)])
    for status, output in ended:
        assert status == 77, output
    assert f"Worker 2 at {hosts[2]} did not join within 3 s" in ended[0][1]
    assert not model_dir.exists()
    assert_none_left(model_dir)


@pytest.mark.processes
def test_workers_that_differ_are_refused_with_the_differences(tmp_path):
    model_dir = tmp_path / "run"
    hosts = free_addresses(2)
    other = "import ddl; ddl.__version__ = '9'; import ddl.main; ddl.main.run()"
    given = arguments(model_dir)
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


def test_a_failure_of_one_is_a_failure_of_all(monkeypatch):
    """With the status of the one that failed, whichever error that was."""
    two, others = workers.Workers(tf.distribute.get_strategy()), [0.0]
    monkeypatch.setattr(two, "gather", lambda own: np.array([own, others]))
    with two.failing_together():
        pass
    for others[0] in (0.0, 70.0):
        with pytest.raises(ConfigError, match="here"), two.failing_together():
            raise ConfigError("here")
    with (
        pytest.raises(DdlError, match=r"output of worker 1 shows .* start all work") as raised,
        two.failing_together(),
    ):
        pass
    assert (type(raised.value), raised.value.exit_status) == (DdlError, 70)


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
