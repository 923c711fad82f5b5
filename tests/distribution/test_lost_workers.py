"""Workers without a launcher, of which one dies or stalls: the others end with 77 and name it."""

import os
import signal
import time

import pytest

from tests.distribution.whole_clusters import (
    addresses,
    arguments,
    assert_none_left,
    finish,
    finish_all,
    processes_of,
    start_worker,
    wait_for,
)

LONG = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000", "CHECKPOINT_EVERY = 20"]
LIMITS = ["--join_timeout=30", "--peer_timeout=6", "--stall_timeout=6"]


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGSTOP)])
def test_lost_in_training(tmp_path, victim, number):
    model_dir = tmp_path / "run"
    hosts = addresses(3)
    flags = [*arguments(model_dir, *LONG, config="digits_mlp.gin"), *LIMITS]
    workers = [start_worker(index, hosts, *flags) for index in range(3)]
    try:
        wait_for(model_dir / "checkpoints" / "step-20.index", workers[0])
        os.kill(processes_of(model_dir)[victim], number)
        others = [worker for index, worker in enumerate(workers) if index != victim]
        deadline = time.monotonic() + 150
        ended = [finish(worker, max(1.0, deadline - time.monotonic())) for worker in others]
    finally:
        workers[victim].send_signal(signal.SIGCONT)
        workers[victim].kill()
        finish_all(workers)
    how = "died" if number == signal.SIGKILL else "did not respond for 6 s"
    for status, output in ended:
        assert status == 77, output
        assert f"Worker {victim} at {hosts[victim]} {how}" in output
        assert "Traceback" not in output
    assert_none_left(model_dir)


@pytest.mark.processes
def test_a_worker_that_never_comes(tmp_path):
    model_dir = tmp_path / "run"
    hosts = addresses(3)
    flags = [*arguments(model_dir, config="digits_mlp.gin"), "--join_timeout=3"]
    ended = finish_all([start_worker(index, hosts, *flags) for index in range(2)])
    for status, output in ended:
        assert status == 77, output
    assert f"Worker 2 at {hosts[2]} did not join within 3 s" in ended[0][1]
    assert not model_dir.exists()
    assert_none_left(model_dir)


def test_limits_are_those_that_are_documented():
    from ddl.cli.flags import FLAGS
    from ddl.distribution.timeouts import ClusterTimeouts

    limits = {"join": 60.0, "peer": 30.0, "stall": 300.0}
    for name, value in limits.items():
        assert getattr(ClusterTimeouts(), name) == FLAGS[f"{name}_timeout"].default == value
