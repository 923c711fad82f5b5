"""Clusters of workers in separate processes."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ddl.launcher.tasks import free_ports
from tests.processes import forked
from tests.run.whole_runs import ROOT

# The batch divides among 1, 2, 3 and 4 replicas with two microbatches each.
PLAN = (
    *("GLOBAL_BATCH_SIZE = 96", "TRAIN_STEPS = 60", "EVAL_EVERY = 30"),
    *("CHECKPOINT_EVERY = 20", "LOG_EVERY = 20"),
)

_PROGRAMS = tempfile.TemporaryDirectory(prefix="ddl-programs-")


def arguments(model_dir, *params):
    return [
        f"--gin_file={ROOT}/configs/digits_mlp.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*PLAN, *params)),
    ]


def start(command, **environment) -> subprocess.Popen:
    return forked.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(workers, *flags) -> subprocess.Popen:
    """Starts `ddl.launch` with these flags for `ddl.main`."""
    command = [sys.executable, "-m", "ddl.launch", f"--num_workers={workers}", "--"]
    return start([*command, *map(str, flags)])


def free_addresses(count) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def start_worker(index, workers, *flags, program=("-m", "ddl.main")):
    """Starts one worker without a launcher, as on a separate host.

    Args:
      index: Index of the worker.
      workers: Addresses of all workers.
      *flags: Flags of the program.
      program: Python's arguments that name the program.
    """
    if program[0] == "-c":  # only modules and files are forked
        file = Path(_PROGRAMS.name) / f"{hashlib.sha256(program[1].encode()).hexdigest()}.py"
        if not file.exists():  # an earlier worker may be reading it
            file.write_text(program[1])
        program = (str(file), *program[2:])
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    command = [sys.executable, *program, *map(str, flags)]
    return start(command, TF_CONFIG=json.dumps(config), PYTHONUNBUFFERED="1")


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
