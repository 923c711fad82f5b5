"""Clusters of real processes: the start, a death, a restart, and a launcher that is killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.launcher.programs import (
    BEGINNING,
    GRANDCHILD,
    ROOT,
    assert_nothing_is_left,
    finish,
    is_running,
    wait_for,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def launch(tmp_path):
    """Starts a launcher of a program's processes, all in a folder for their notes."""
    started = []

    def start(program, num_workers=2, num_ps=0, **options):
        command = f"[sys.executable, '-S', '-c', {BEGINNING + program!r}]"
        options = {"log_dir": "logs", **options}
        launcher = (
            "import sys\n"
            "from ddl.launcher.cluster import Cluster\n"
            f"sys.exit(Cluster({command}, {num_workers}, {num_ps}, **{options!r}).run())"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", launcher],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for file in tmp_path.glob("*.pid"):  # left by a failed test
        if is_running(file):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for process in started:
        process.communicate()


def test_a_cluster_starts_and_leaves_nothing_behind(launch, tmp_path):
    """The output of the first is shown, that of the others is in files; signals are as usual."""
    program = """
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
cores = sorted(os.sched_getaffinity(0))
note(f"{name}.json", json.dumps([config["task"], len(blocked), cores]))
print(f"out of {name}")
print(f"err of {name}", file=sys.stderr)
start_another()
"""
    workers = min(2, len(os.sched_getaffinity(0)))
    launcher = launch(GRANDCHILD + program, workers, pin="cores")
    status, output, errors = finish(launcher)
    assert status == 0, errors
    assert output == "out of worker-0\n"
    assert "err of worker-0" in errors
    share = len(os.sched_getaffinity(0)) // workers
    for index in range(workers):
        task, blocked, cores = json.loads((tmp_path / f"worker-{index}.json").read_text())
        assert task == {"type": "worker", "index": index}
        assert (blocked, len(cores)) == (0, share)
    if workers > 1:
        log = (tmp_path / "logs/worker-1.log").read_text().splitlines()
        assert {*log[1:]} == {"out of worker-1", "err of worker-1"}
    assert_nothing_is_left(tmp_path, workers)


def test_one_dies_and_all_end(launch, tmp_path):
    """So do processes that they started, and one that ignores SIGTERM."""
    program = """
if index == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
start_another()
running()
wait_for("worker-0.pid", "worker-1.pid", "worker-2.pid")
if index == 2:
    print("the end")
    sys.exit(3)
wait_for_ever()
"""
    status, _, errors = finish(launch(GRANDCHILD + program, 3, grace_seconds=0.5))
    assert status == 3
    assert "worker 2 ended with status 3" in errors
    assert "  the end" in errors
    assert "The launcher killed worker 1: it did not end" in errors
    assert_nothing_is_left(tmp_path, 6)


def test_a_restart_after_a_kill_and_a_signal_that_all_hear(launch, tmp_path):
    program = """
def save(number, frame):
    note(f"{name}.saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
turn = 1 if os.path.exists(name + ".pid") else 0
running()
wait_for("worker-0.pid", "worker-1.pid")
if turn == 0 and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if turn == 1:
    note(f"{name}.again")
wait_for_ever()
"""
    launcher = launch(program, max_restarts=1)
    wait_for(lambda: len(list(tmp_path.glob("*.again"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    status, _, errors = finish(launcher)
    assert status == 75
    assert "worker 1 was killed by SIGKILL" in errors
    assert errors.count("Restart 1 of 1: all processes.") == 1
    assert len(list(tmp_path.glob("*.saved"))) == 2
    assert_nothing_is_left(tmp_path, 2)


def test_a_launcher_that_is_killed_leaves_nothing_behind(launch, tmp_path):
    program = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
def end(*arguments):
    note("ended-alone")
    os._exit(1)
signal.signal(signal.SIGALRM, end)
running()
wait_for_ever()
"""
    launcher = launch(program, 3)
    files = [tmp_path / f"worker-{index}.pid" for index in range(3)]
    wait_for(lambda: all(file.exists() for file in files))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(is_running(file) for file in files))
    assert not (tmp_path / "ended-alone").exists()
