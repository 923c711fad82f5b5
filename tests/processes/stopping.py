"""Processes that are stopped at a moment, so that a signal comes while that moment lasts."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def stop(number: int) -> bool:
    """Sends SIGSTOP and waits for all threads; returns whether the process lives, stopped."""
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGSTOP)
    while (states := _states(number)) - set("TtZX"):
        time.sleep(0.0005)
    return bool(states & set("Tt"))


def _states(number: int) -> set[str]:
    """Returns the states of the threads as in /proc: T is stopped, Z and X have ended."""
    states = set()
    for file in Path(f"/proc/{number}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.add(file.read_text().rpartition(")")[2].split()[0])
    return states
