"""The processes of a check, two at a time. Imports no TensorFlow."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ddl
from ddl.checking.configurations import ALL, ONE, RESUMED, WRITER, Configuration
from ddl.checking.recording import Failure, Recording
from ddl.errors import ConfigError

_AT_ONCE = 2
_LIMIT_SECONDS = 900.0
"""A collective that one replica does not join would wait forever."""

_PAUSE_SECONDS = 0.05
_LOG_BYTES = 100_000  # of the end of a log
_LINE_CHARACTERS = 300


class _Process(NamedTuple):
    configuration: Configuration
    process: subprocess.Popen
    log: Path
    began: float


def record(jobs: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[Configuration, Recording]]:
    """Runs each job in all configurations, each configuration in a process of its own.

    Args:
      jobs: For each task, either "factory", such as "package.module:function", or "gin", a dict of
        "files", "params", "search_path" and "allow_unused".
      folder: An empty folder.

    Returns:
      For each job, the recording of each configuration; that of `ONE` alone if it has failed in
      all jobs.

    Raises:
      ConfigError: If a job cannot be run in any configuration, as without its module.
    """
    located = []
    for number, job in enumerate(jobs):
        own = folder / str(number)
        own.mkdir()
        located.append({**job, "folder": str(own)})
    # One device first, since nothing can be compared without it; then the longest runs; the
    # resumed one after its checkpoint.
    others = sorted(set(ALL) - {ONE, RESUMED, WRITER}, key=lambda one: -one.parts * one.replicas)
    waiting = [ONE, WRITER, *others, RESUMED]
    limit = _LIMIT_SECONDS * len(jobs)
    running: list[_Process] = []
    crashes: dict[Configuration, str] = {}
    try:
        while waiting or running:
            for one in [p for p in running if p.process.poll() is not None]:
                running.remove(one)
                if one.process.returncode:
                    crashes[one.configuration] = _crash(one, limit)
                _end_others(one.process)
                found = [_read(job, one.configuration, crashes) for job in located]
                for recording in found:
                    _check_call(recording)
                if one.configuration == ONE and all(r.failure is not None for r in found):
                    return [{ONE: recording} for recording in found]
            writes = any(one.configuration == WRITER for one in running)
            if waiting and len(running) < _AT_ONCE and not (waiting[0] == RESUMED and writes):
                running.append(_start(waiting.pop(0), located, folder))
            else:
                time.sleep(_PAUSE_SECONDS)
            for one in running:
                if time.monotonic() - one.began > limit:
                    one.process.kill()
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
            _end_others(one.process)
    return [
        {configuration: _read(job, configuration, crashes) for configuration in ALL}
        for job in located
    ]


def _start(
    configuration: Configuration, jobs: Sequence[Mapping[str, Any]], folder: Path
) -> _Process:
    spec = folder / f"{configuration.file}.json"
    here = os.getcwd()
    path = sys.path if here in sys.path or "" in sys.path else [here, *sys.path]
    spec.write_text(json.dumps({"path": path, "configuration": configuration, "jobs": jobs}))
    log = folder / f"{configuration.file}.log"
    packages = str(Path(ddl.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")]).strip(":"),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    environment.pop("TF_CONFIG", None)  # each process is alone
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddl.checking.worker", str(spec)],
            env=environment,
            stdin=subprocess.PIPE,  # closed if this process ends, which ends the other one
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return _Process(configuration, process, log, time.monotonic())


def _end_others(process: subprocess.Popen) -> None:
    """Ends what a process that has ended has started itself, and closes the pipe to it."""
    if process.stdin is not None:
        process.stdin.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _crash(one: _Process, limit: float) -> str:
    """Returns how a process failed, and the last lines of its log."""
    with one.log.open("rb") as log:
        log.seek(max(log.seek(0, os.SEEK_END) - _LOG_BYTES, 0))
        text = log.read().decode(errors="replace")
    lines = [line[:_LINE_CHARACTERS] for line in text.strip().splitlines()[-15:]]
    how = f"ended with status {one.process.returncode}"
    if one.process.returncode < 0:
        how = f"was killed by signal {-one.process.returncode}"
    if time.monotonic() - one.began > limit:
        how = f"did not end within {limit:.0f} s, as when a replica does not join a collective"
    return "\n".join([f"The process {how}.", *lines])


def _check_call(recording: Recording) -> None:
    """Raises ConfigError for a mistake that no configuration can run."""
    if recording.mistake is not None:
        raise ConfigError(recording.mistake)


def _read(
    job: Mapping[str, Any], configuration: Configuration, crashes: Mapping[Configuration, str]
) -> Recording:
    """Reads a recording; without one, returns the reason."""
    file = Path(job["folder"]) / configuration.file
    if file.exists():
        return pickle.loads(file.read_bytes())
    message = crashes.get(configuration, "The process wrote no result.")
    return Recording(failure=Failure(message, is_refusal=False))
