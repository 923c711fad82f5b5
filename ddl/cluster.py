"""A cluster on one machine: a process for each task, all started again when one of them dies.

An exact resume makes that enough: what the processes had saved is where they go on. With parameter
servers a worker that dies is started again alone: the weights are elsewhere, and the others go on.
"""

import datetime
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ddl.choices import Pin
from ddl.cluster_attempt import ClusterAttempt, say
from ddl.cluster_process import HEARD, ClusterProcess
from ddl.cluster_tasks import ClusterTask, cluster_tasks, free_ports, tf_configs
from ddl.errors import (
    ConfigError,
    DdlError,
    TrainingDiverged,
    TrainingInterrupted,
    WorkerLost,
)
from ddl.pinning import place_tasks
from ddl.process_log import ProcessLog


class Cluster:
    """Runs a command as every task of a cluster."""

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        num_ps: int = 0,
        *,
        max_restarts: int = 0,
        grace_seconds: float = 5.0,
        pin: Pin = "none",
        log_dir: str | os.PathLike[str] | None = None,
        live: bool = False,
    ):
        """Starts nothing yet.

        Args:
          command: What each process runs; TF_CONFIG in its environment says which task it is.
          num_workers: How many workers.
          num_ps: How many parameter servers. With any there is a chief too.
          max_restarts: How often all, or a worker of parameter servers, are started again.
          grace_seconds: Time between SIGTERM and SIGKILL for those that have to end.
          pin: Gives each worker cores of its own, or a GPU.
          log_dir: Where all but the first task write, into `worker-1.log`, …; None for a new
            temporary folder.
          live: Shows these logs too as they grow.

        Raises:
          ConfigError: If there are not enough cores or GPUs.
        """
        self._command = command
        self._tasks = cluster_tasks(num_workers, num_ps)
        self._places = place_tasks(self._tasks, pin)
        self._max_restarts = max_restarts
        self._grace_seconds = grace_seconds
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._live = live
        self._restarts = 0

    def run(self) -> int:
        """Starts the processes and waits for the last of them. Main thread only.

        SIGTERM and SIGINT are passed on once; a second one kills all processes.

        Returns:
          The worst of their exit statuses.

        Raises:
          ConfigError: If a log cannot be written.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would make statuses get lost
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            self._open_log_dir()
            while True:
                statuses, asked_to_stop = self._run_once()
                if (
                    asked_to_stop
                    or not self._may_restart(statuses)
                    # A signal may have come since the last process ended.
                    or signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), 0) is not None
                ):
                    worst = max(statuses, key=_badness)
                    return worst if worst >= 0 else 128 - worst
                self._count_restart("")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run_once(self) -> tuple[list[int], bool]:
        ports = free_ports(len(self._tasks))
        configs = dict(zip(self._tasks, tf_configs(self._tasks, ports), strict=True))
        places = dict(zip(self._tasks, self._places, strict=True))

        def start(task: ClusterTask) -> ClusterProcess:
            # Lines come to a log one by one, and none is lost when the process is killed.
            environment = {"PYTHONUNBUFFERED": "1", **os.environ, "TF_CONFIG": configs[task]}
            log = self._open_log(task)
            return ClusterProcess(task, self._command, environment, places[task], log)

        def successor(dead: ClusterProcess) -> Callable[[], ClusterProcess] | None:
            status = WorkerLost.exit_status if dead.status is None else dead.status
            has_servers = any(task.kind == "ps" for task in self._tasks)
            if not has_servers or dead.task.kind != "worker":
                return None
            # One that lost another did not die by itself.
            if status == WorkerLost.exit_status or not self._may_restart([status]):
                return None
            self._count_restart(f": {dead.task} alone")
            return lambda: start(dead.task)

        with ClusterAttempt(self._grace_seconds, self._live, successor) as attempt:
            for task in self._tasks:
                attempt.add(start(task))
            return attempt.watch(), attempt.asked_to_stop

    def _may_restart(self, statuses: Sequence[int]) -> bool:
        """Whether processes that ended so are started again. If not although wanted, says why."""
        worst = max(statuses, key=_badness)
        if worst == 0 or self._max_restarts == 0:
            return False
        if TrainingDiverged.exit_status in statuses:
            say("no restart: training diverged, and would again")
        elif worst == DdlError.exit_status:
            say(f"no restart: status {worst} is an error in flags, config or data")
        elif self._restarts == self._max_restarts:
            say(f"no restart: there were {self._restarts}, as many as --max_restarts allows")
        else:
            return True
        return False

    def _count_restart(self, what: str) -> None:
        self._restarts += 1
        say(f"restart {self._restarts} of {self._max_restarts}{what}")

    def _open_log_dir(self) -> None:
        if len(self._tasks) == 1:
            return
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="ddl-logs-"))
        say(f"the output of all but {self._tasks[0]} is in {self._log_dir}")

    def _open_log(self, task: ClusterTask) -> ProcessLog | None:
        if task == self._tasks[0] or self._log_dir is None:
            return None
        now = datetime.datetime.now().isoformat(" ", "seconds")
        start = f"restart {self._restarts}" if self._restarts else "start"
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            return ProcessLog(
                self._log_dir / f"{task.kind}-{task.index}.log", f"--- {task}, {start}, {now} ---"
            )
        except OSError as error:
            raise ConfigError(
                f"--log_dir={self._log_dir} cannot be written: {error.strerror}"
            ) from error


def _badness(status: int) -> int:
    """The larger, the sooner it is the status of the whole."""
    if status < 0:
        return 5
    order = {
        0: 0,
        TrainingInterrupted.exit_status: 1,
        WorkerLost.exit_status: 2,
        TrainingDiverged.exit_status: 4,
    }
    return order.get(status, 3)
