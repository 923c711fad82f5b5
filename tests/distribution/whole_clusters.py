"""Clusters of workers in separate processes, and checks that no process is left."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddl.launcher.tasks import free_ports
from tests.processes import commands, forked
from tests.run.whole_runs import ROOT, SMALL

REGULARIZED = "digits_cnn_regularized.gin"
# The batch divides among 1, 2, 3 and 4 replicas with two microbatches each.
PLAN = (
    *("GLOBAL_BATCH_SIZE = 96", "TRAIN_STEPS = 60", "EVAL_EVERY = 30"),
    *("CHECKPOINT_EVERY = 20", "LOG_EVERY = 20"),
)

_PROGRAMS = tempfile.TemporaryDirectory(prefix="ddl-programs-")


def arguments(model_dir, *params, config=REGULARIZED):
    if config == REGULARIZED:
        params = (*SMALL, *params)
    return [
        f"--gin_file={ROOT}/configs/{config}",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*PLAN, *params)),
    ]


def launch(workers, *flags, launcher=()) -> subprocess.Popen:
    """Starts `ddl.launch` with these flags for `ddl.main`."""
    command = [sys.executable, "-m", "ddl.launch", f"--num_workers={workers}", *launcher, "--"]
    return forked.Popen(
        [*command, *map(str, flags)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def addresses(count, host="127.0.0.1") -> list[str]:
    return [f"{host}:{port}" for port in free_ports(count)]


def start_worker(index, workers, *flags, prefix=(), program=("-m", "ddl.main"), stdin=None):
    """Starts one worker without a launcher, as on a separate host.

    Args:
      index: Index of the worker.
      workers: Addresses of all workers.
      *flags: Flags of the program.
      prefix: Command that runs the worker, such as one that enters a network namespace.
      program: Python's arguments that name the program.
      stdin: Standard input of the process.
    """
    if program[0] == "-c":  # only modules and files are forked
        file = Path(_PROGRAMS.name) / f"{hashlib.sha256(program[1].encode()).hexdigest()}.py"
        if not file.exists():  # an earlier worker may be reading it
            file.write_text(program[1])
        program = (str(file), *program[2:])
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    return forked.Popen(
        [*prefix, sys.executable, *program, *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, timeout=600):
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def finish_all(processes, timeout=600) -> list[tuple[int, str]]:
    """Returns the status and output of each process; kills all of them in any case."""
    try:
        return [finish(process, timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def processes_of(model_dir) -> dict[int, int]:
    """Returns the process IDs of a run's workers by index."""
    found = {}
    for number, (command, environment) in commands.running().items():
        # Skips the launcher, which has no index, and a process that is not fully started.
        if f"--model_dir={model_dir}" in command and '"index":' in environment:
            index = environment.split('"index":')[1].strip()[0]
            found[int(index)] = number
    return found


def assert_none_left(model_dir):
    deadline = time.monotonic() + 60
    while processes_of(model_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = processes_of(model_dir)
    for number in left.values():
        os.kill(number, signal.SIGKILL)
    assert left == {}


def wait_for(path: Path, process):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
