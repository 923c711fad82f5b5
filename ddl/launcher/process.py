"""A process of a cluster. It dies with its launcher, which kills its children when it ends."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from ddl.launcher.tasks import ClusterTask
from ddl.output import dropping

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGQUIT)
"""Signals that the launcher blocks and waits for. SIGQUIT, which shows stacks, ends nothing."""

_SET_PARENT_DEATH_SIGNAL = 1
_LIBRARY = ctypes.CDLL(None)
_PIPE_BYTES = 1 << 16
_NAMES = {-number: f"was killed by {number.name}" for number in signal.Signals}


class ClusterProcess:
    """A running process, the leader of its own session and process group.

    Attributes:
      task: The task that the process runs.
      status: None while the process runs; then its exit status, or minus the number of the signal
        that killed it.
    """

    def __init__(self, task: ClusterTask, command: Sequence[str], tf_config: str, prefixed: bool):
        """Starts the process. The launcher must be single-threaded.

        Args:
          task: The task that the process runs.
          command: The program and its arguments.
          tf_config: The value of TF_CONFIG.
          prefixed: Whether the launcher prints the output of the process, with the task before each
            line; otherwise the process writes to the launcher's output itself.
        """
        self.task = task
        self.status: int | None = None
        self._unfinished = b""
        launcher = os.getpid()

        def prepare() -> None:
            # Runs between fork and exec. In a launcher with threads it could wait forever for a
            # lock that another thread held at the fork.
            _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before prctl
                os.kill(os.getpid(), signal.SIGKILL)
            for number in HEARD:
                signal.signal(number, signal.SIG_DFL)
            # One that comes before the program has a handler would end it.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

        own = {**task.environment, "TF_CONFIG": tf_config}
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            # Unbuffered output reaches the launcher line by line, and a kill loses none of it.
            env={"PYTHONUNBUFFERED": "1", **os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if prefixed else None,
            stderr=subprocess.STDOUT if prefixed else None,
            start_new_session=True,
            preexec_fn=prepare,
        )
        self._output = self._process.stdout
        if self._output is not None:
            os.set_blocking(self._output.fileno(), False)

    def has_just_ended(self) -> bool:
        """Returns whether the process ended since the last call, and if so kills its children."""
        # WNOWAIT keeps the process ID reserved, so that the kill cannot hit another group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.status is not None or os.waitid(os.P_PID, self._process.pid, options) is None:
            return False
        self.kill()
        return True

    def send(self, number: int) -> None:
        """Sends a signal to the process, which must be running, but not to its children."""
        os.kill(self._process.pid, number)  # the process ID is reserved until `kill` waits

    def kill(self) -> None:
        """Kills the process and its group unless it has ended; prints the rest of its output."""
        if self.status is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.status = self._process.wait()
        while self.show_output():
            pass
        if self._unfinished:
            self._print([self._unfinished])

    def show_output(self) -> bool:
        """Prints new lines of a prefixed process to standard error, up to what a pipe holds.

        Returns:
          Whether there was any output since the last call.
        """
        written = self._output.read(_PIPE_BYTES) if self._output is not None else None
        *lines, self._unfinished = (self._unfinished + (written or b"")).split(b"\n")
        self._print(lines)
        return bool(written)

    def _print(self, lines: Sequence[bytes]) -> None:
        text = "".join(f"[{self.task}] {line.decode(errors='replace')}\n" for line in lines)
        print(text, end="", file=dropping(sys.stderr), flush=True)

    def describe_exit(self) -> str:
        """Describes the end for a message: 'ended with status 3', 'was killed by SIGKILL'."""
        return _NAMES.get(self.status or 0, f"ended with status {self.status}")
