"""One process of a cluster: it does not outlive its launcher, nor its own children it."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddl.cluster_tasks import ClusterTask
from ddl.pinning import Place
from ddl.process_log import ProcessLog

# What the launcher waits for, and has blocked.
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

_SET_PARENT_DEATH_SIGNAL = 1
_LIBRARY = ctypes.CDLL(None)


class ClusterProcess:
    """Runs from its construction on, as the leader of a session and a process group of its own.

    Attributes:
      task: Which one of the cluster it is.
      log: Where it writes; None if that is where the launcher does.
      status: None while it runs; then its exit status, or less the number of the signal that
        killed it.
    """

    def __init__(
        self,
        task: ClusterTask,
        command: Sequence[str],
        environment: Mapping[str, str],
        place: Place,
        log: ProcessLog | None,
    ):
        """Starts it. For a launcher without threads, in its main thread."""
        self.task = task
        self.log = log
        self.status: int | None = None
        launcher = os.getpid()

        def prepare() -> None:
            # Runs between fork and exec. With threads that could wait for ever for a lock that
            # one of them held; the launcher has none.
            _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before that
                os.kill(os.getpid(), signal.SIGKILL)
            if place.cores is not None:
                os.sched_setaffinity(0, place.cores)
            for number in HEARD:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

        output = None if log is None else log.writing
        self._process = subprocess.Popen(
            command,
            env={**environment, **place.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )

    @property
    def is_running(self) -> bool:
        """Whether no end of it was noticed yet."""
        return self.status is None

    def has_just_ended(self) -> bool:
        """Whether it ended since the last call. If so, what it has started is killed."""
        # WNOWAIT leaves its number taken, so that the group that is killed is nobody else's.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if not self.is_running or os.waitid(os.P_PID, self._process.pid, options) is None:
            return False
        self.kill()
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone: what it has started is its own affair."""
        if self.is_running:
            os.kill(self._process.pid, number)  # its number is taken until its end is noticed

    def kill(self) -> None:
        """Ends it, with all that it has started, and waits for its end."""
        if not self.is_running:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.status = self._process.wait()

    def how_it_ended(self) -> str:
        """For a message: 'ended with status 3', 'was killed by SIGKILL'."""
        if self.status is None:
            return "is running"
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:  # not every number has a name
            return f"was killed by signal {-self.status}"
