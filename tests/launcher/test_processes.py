"""Clusters of real processes: the start, a death, and a launcher that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

# What the programs begin with. None of them stays forever, whatever goes wrong. `note` leaves a
# file that is there whole or not at all; `running` says that a process is there, and so are the
# handlers it has set; `start_another` starts a process that ignores SIGTERM.
BEGINNING = """
import json, os, pathlib, signal, subprocess, sys, time
signal.alarm(300)
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
name = f"worker-{index}"
def note(file, text=""):
    pathlib.Path(file + ".partial").write_text(str(text))
    os.replace(file + ".partial", file)
def wait_for(*files):
    while not all(os.path.exists(file) for file in files):
        time.sleep(0.01)
def running():
    note(name + ".pid", os.getpid())
def wait_for_ever():
    while True:
        signal.pause()
def start_another():
    ignore = "import os, pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    ignore += "signal.alarm(300); "
    tell = f"pathlib.Path('{name}-child.partial').write_text(str(os.getpid())); "
    end = f"os.replace('{name}-child.partial', '{name}-child.pid'); signal.pause()"
    subprocess.Popen([sys.executable, "-S", "-c", ignore + tell + end])
    wait_for(name + "-child.pid")
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a launcher of a program's processes, all in a folder for their notes."""
    started = []

    def start(program, num_workers, **options):
        command = f"[sys.executable, '-S', '-c', {BEGINNING + program!r}]"
        launcher = (
            "import sys\n"
            "from ddl.launcher import cluster\n"
            "cluster._GRACE_SECONDS = 0.5\n"
            f"sys.exit(cluster.Cluster({command}, {num_workers}, **{options!r}).run())"
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


def is_running(file: Path) -> bool:
    try:
        state = Path(f"/proc/{int(file.read_text())}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(condition):
    patience = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < patience, "nothing happened"
        time.sleep(0.01)


def finish(launcher, folder, processes):
    """Returns the launcher's status, output and errors; asserts that it left no process."""
    output, errors = launcher.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    files = sorted(folder.glob("*.pid"))
    assert len(files) == processes
    assert [file.name for file in files if is_running(file)] == []
    return launcher.returncode, output, errors


def test_a_cluster_starts_and_leaves_nothing_behind(launch, tmp_path):
    """The first writes to the launcher's output, the others to its errors with a prefix."""
    program = """
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
note(f"{name}.json", json.dumps(len(blocked)))
print(f"out of {name}")
print(f"err of {name}" + "x" * 200000, file=sys.stderr)
print("no end", end="")
start_another()
"""
    status, output, errors = finish(launch(program, 2), tmp_path, 2)
    assert status == 0, errors
    assert output == "out of worker-0\nno end"
    assert [(tmp_path / f"worker-{n}.json").read_text() for n in range(2)] == ["0", "0"]
    lines = errors.splitlines()
    assert sum(line.startswith("err of worker-0xxx") for line in lines) == 1
    others = [line.rstrip("x") for line in lines if line.startswith("[")]
    texts = ("out of worker-1", "err of worker-1", "no end")
    assert others == [f"[worker 1] {text}" for text in texts]


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
