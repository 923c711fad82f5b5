"""A process of a cluster. It dies with its launcher, which kills its children when it ends."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddl.launcher.log import ProcessLog
from ddl.launcher.pinning import Pinning
from ddl.launcher.tasks import ClusterTask

# Signals that the launcher blocks and waits for.
PASSED_ON = (signal.SIGQUIT,)
"""Signals that the launcher passes on and that end nothing: SIGQUIT shows stacks."""

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *PASSED_ON)

_SET_PARENT_DEATH_SIGNAL = 1
_LIBRARY = ctypes.CDLL(None)


class ClusterProcess:
    """A running process, the leader of its own session and process group.

    Attributes:
      task: The task that the process runs.
      log: Where the process writes; None if it shares the launcher's output.
      status: None while the process runs; then its exit status, or minus the number of the signal
        that killed it.
    """

    def __init__(
        self,
        task: ClusterTask,
        command: Sequence[str],
        environment: Mapping[str, str],
        pinning: Pinning,
        log: ProcessLog | None,
    ):
        """Starts the process. The launcher must be single-threaded."""
        self.task = task
        self.log = log
        self.status: int | None = None
        launcher = os.getpid()

        def prepare() -> None:
            # Runs between fork and exec. In a launcher with threads it could wait forever for a
            # lock that another thread held at the fork.
            _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before prctl
                os.kill(os.getpid(), signal.SIGKILL)
            if pinning.cores is not None:
                os.sched_setaffinity(0, pinning.cores)
            for number in HEARD:
                # One that comes before the program has a handler would end it.
                ignored = number in PASSED_ON
                signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

        output = None if log is None else log.writing
        self._process = subprocess.Popen(
            command,
            env={**environment, **pinning.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )

    @property
    def is_running(self) -> bool:
        """Whether the launcher has not yet seen the process end."""
        return self.status is None

    def has_just_ended(self) -> bool:
        """Returns whether the process ended since the last call, and if so kills its children."""
        # WNOWAIT keeps the process ID reserved, so that the kill cannot hit another group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if not self.is_running or os.waitid(os.P_PID, self._process.pid, options) is None:
            return False
        self.kill()
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process but not to its children."""
        if self.is_running:
            os.kill(self._process.pid, number)  # the process ID is reserved until `kill` waits

    def kill(self) -> None:
        """Kills the process and its process group, and waits until the process ends."""
        if not self.is_running:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.status = self._process.wait()

    def describe_exit(self) -> str:
        """Describes the end for a message: 'ended with status 3', 'was killed by SIGKILL'."""
        if self.status is None:
            return "is running"
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:  # not every signal number has a name
            return f"was killed by signal {-self.status}"
