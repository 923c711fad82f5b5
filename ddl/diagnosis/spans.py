"""The phases of a process as a trace that Perfetto and Chrome show."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddl.diagnosis.phases import Phase, observed_by
from ddl.files import open_itself, unwritable

FOLDER = "spans"
"""Folder in the run's directory for the traces of its processes."""


@contextlib.contextmanager
def written_in(model_dir: Path, name: str, report: Callable[[str], None]) -> Iterator[None]:
    """Writes the phases that end within the `with` block to a file of its own in `FOLDER`.

    If the file cannot be written, this is reported once, and the run continues without it. The
    file of a killed process can be opened too, since the format needs no closing bracket.

    Args:
      model_dir: The run's directory.
      name: Name of the process in the trace, such as "worker 0".
      report: Prints a line.
    """
    file = model_dir / FOLDER / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.json"
    # Processes on one machine or several are shown on one axis.
    offset = time.time() - time.monotonic()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = open(file, "x", encoding="utf-8", buffering=1, opener=open_itself)  # noqa: SIM115
    except OSError as error:
        report(f"There are no spans: {unwritable(file, error)} Training continues.")
        yield
        return
    fails = False

    def write(text: str) -> None:
        nonlocal fails
        if fails:
            return
        try:
            stream.write(text)
        except OSError as error:
            fails = True
            report(f"The spans end here: {unwritable(file, error)} Training continues.")

    def observe(phase: Phase, begins: bool) -> None:
        if not begins:
            write(",\n" + json.dumps(_event(phase, time.monotonic(), offset)))

    named = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": name}}
    write("[\n" + json.dumps(named))
    try:
        with observed_by(observe):
            yield
        write("\n]\n")
    finally:
        with contextlib.suppress(OSError):  # reported already, or the last line
            stream.close()


def _event(phase: Phase, end: float, offset: float) -> dict[str, object]:
    """Returns a complete event of the Chrome trace format; its times are in microseconds."""
    return {
        "name": phase.name,
        "ph": "X",
        "ts": round((phase.since + offset) * 1e6, 1),
        "dur": round((end - phase.since) * 1e6, 1),
        "pid": os.getpid(),
        "tid": 1,
        "args": {"details": phase.described(), "kind": phase.kind},
    }
