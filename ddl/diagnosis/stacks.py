"""The stacks of all Python threads: on SIGQUIT, and when a worker was lost."""

import _thread
import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ddl.diagnosis.phases import described, described_of
from ddl.files import open_itself
from ddl.output import say

FOLDER = "stacks"
"""Folder in the run's directory for the stacks of processes that lost a worker."""

_STANDARD_ERROR = 2
_KEEP_SECONDS = 5.0
_FOLDER: dict[str, Path | None] = {"of the run": None}


def keep_in(model_dir: Path | None) -> None:
    """Sets the run's directory, into whose folder `FOLDER` `keep` writes; None for no directory."""
    _FOLDER["of the run"] = None if model_dir is None else model_dir / FOLDER


@contextlib.contextmanager
def shown_on_quit() -> Iterator[None]:
    """Shows stacks and phases on standard error at each SIGQUIT; the process goes on.

    Main thread only. The stacks are written by a handler in C, even while the main thread waits in
    TensorFlow. A thread adds the phases.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python's own handler in C, which the one of faulthandler calls, writes the number of the
    # signal to this descriptor at once. StopSignals passes it on.
    descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    previous = signal.signal(signal.SIGQUIT, _nothing)
    # A run answers this one too, later; until then it must not end the process.
    before = signal.signal(signal.SIGUSR2, _nothing)
    faulthandler.register(signal.SIGQUIT, file=_STANDARD_ERROR, all_threads=True, chain=True)
    _thread.start_new_thread(_watch, (reading,))
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGQUIT)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL if previous is None else previous)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)
        signal.set_wakeup_fd(descriptor)
        os.close(writing)  # ends the thread


def keep(reason: str, error: BaseException | None = None) -> Path | None:
    """Writes phases and stacks to a file of the run's directory. Never raises.

    Takes at most some seconds: a file system may be gone with the machine that was lost.

    Args:
      reason: Why, for the first line.
      error: The error that ends the process; its phases and its traceback are written too.

    Returns:
      The file; None if the run has no directory, or the file cannot be written.
    """
    folder = _FOLDER["of the run"]
    if folder is None:
        return None
    file = folder / f"{socket.gethostname()}-{os.getpid()}.txt"
    phases = described() if error is None else described_of(error)
    written = threading.Event()

    def write() -> None:
        if _write(file, reason, phases, error):
            written.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_KEEP_SECONDS)
    return file if written.is_set() else None


def _write(file: Path, reason: str, phases: str, error: BaseException | None) -> bool:
    """Writes a report, and returns whether it is written."""
    try:
        file.parent.mkdir(exist_ok=True)
        with open(file, "a", encoding="utf-8", opener=open_itself) as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n{phases}\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)
            if error is not None:
                stream.write("The error, at its origin first:\n")
                stream.writelines(_places_of(error))
    except OSError:
        return False
    return True


def _places_of(error: BaseException) -> Iterator[str]:
    """Yields the places in the code that an error passed, of its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    trace, found = error.__traceback__, []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(f'  File "{code.co_filename}", line {trace.tb_lineno} in {code.co_name}\n')
        trace = trace.tb_next
    yield from reversed(found)


def _watch(reading: int) -> None:
    while numbers := os.read(reading, 64):
        if signal.SIGQUIT in numbers:
            say(described())
    os.close(reading)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Leaves the signal to faulthandler and to the thread."""
