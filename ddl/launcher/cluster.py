"""A cluster on one machine: one process for each task, all restarted when one of them dies.

Restarting is enough because a run resumes exactly from its last checkpoint. With parameter servers,
a worker that dies is restarted alone: the parameter servers hold the weights, and the others
continue.
"""

import datetime
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ddl.choices import Pin
from ddl.errors import (
    ConfigError,
    DdlError,
    TrainingDiverged,
    TrainingInterrupted,
    WorkerLost,
)
from ddl.launcher.attempt import ClusterAttempt
from ddl.launcher.log import ProcessLog
from ddl.launcher.messages import say
from ddl.launcher.pinning import pin_tasks
from ddl.launcher.process import HEARD, ClusterProcess
from ddl.launcher.tasks import ClusterTask, cluster_tasks, free_ports, tf_configs


class Cluster:
    """A cluster whose tasks all run the same command."""

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
        """Assigns cores or GPUs to the tasks. Starts no process.

        Args:
          command: The command of each process; TF_CONFIG in its environment names its task.
          num_workers: Number of workers.
          num_ps: Number of parameter servers. With at least one there is also a chief.
          max_restarts: Maximum number of restarts, of all tasks or of one worker alone.
          grace_seconds: Seconds between SIGTERM and SIGKILL for processes that must end.
          pin: Whether each worker gets its own cores, its own GPU, or neither.
          log_dir: Folder for the logs `worker-1.log`, … of all tasks but the first; None for a new
            temporary folder.
          live: Whether to print these logs as they grow.

        Raises:
          ConfigError: If there are not enough cores or GPUs.
        """
        self._command = command
        self._tasks = cluster_tasks(num_workers, num_ps)
        self._places = pin_tasks(self._tasks, pin)
        self._max_restarts = max_restarts
        self._grace_seconds = grace_seconds
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._live = live
        self._restarts = 0

    def run(self) -> int:
        """Starts the processes and waits until the last one ends. Main thread only.

        The first SIGTERM or SIGINT is passed on; a second one kills all processes.

        Returns:
          The worst exit status; 128 plus the signal's number if a signal killed that process.

        Raises:
          ConfigError: If a log cannot be written, or there are not enough free ports.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses are lost
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            self._open_log_dir()
            while True:
                statuses, asked_to_stop = self._run_once()
                if (
                    asked_to_stop
                    or not self._may_restart(statuses)
                    # A signal may have arrived since the last process ended.
                    or signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), 0) is not None
                ):
                    worst = max(statuses, key=_badness)
                    return worst if worst >= 0 else 128 - worst
                self._count_restart("all processes")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run_once(self) -> tuple[list[int], bool]:
        try:
            ports = free_ports(len(self._tasks))
        except OSError as error:
            raise ConfigError(
                f"The launcher could not find {len(self._tasks)} free ports: {error.strerror}. "
                "Start fewer processes, or raise the limit of open files (ulimit -n)."
            ) from error
        configs = dict(zip(self._tasks, tf_configs(self._tasks, ports), strict=True))
        places = dict(zip(self._tasks, self._places, strict=True))

        def start(task: ClusterTask) -> ClusterProcess:
            # Unbuffered output reaches the log line by line, and a kill loses none of it.
            environment = {"PYTHONUNBUFFERED": "1", **os.environ, "TF_CONFIG": configs[task]}
            log = self._open_log(task)
            return ClusterProcess(task, self._command, environment, places[task], log)

        def successor(dead: ClusterProcess) -> Callable[[], ClusterProcess] | None:
            status = WorkerLost.exit_status if dead.status is None else dead.status
            has_servers = any(task.kind == "ps" for task in self._tasks)
            if not has_servers or dead.task.kind != "worker":
                return None
            # WorkerLost means that another process died first.
            if status == WorkerLost.exit_status or not self._may_restart([status]):
                return None
            self._count_restart(f"{dead.task} alone")
            return lambda: start(dead.task)

        with ClusterAttempt(self._grace_seconds, self._live, successor) as attempt:
            for task in self._tasks:
                attempt.add(start(task))
            return attempt.watch(), attempt.asked_to_stop

    def _may_restart(self, statuses: Sequence[int]) -> bool:
        """Returns whether to restart after these statuses; reports why not where one was wanted."""
        worst = max(statuses, key=_badness)
        if worst == 0 or self._max_restarts == 0:
            return False
        if TrainingDiverged.exit_status in statuses:
            say("No restart: training diverged and would diverge again.")
        elif DdlError.exit_status in statuses:
            say(
                f"No restart: status {DdlError.exit_status} means an error in flags, config, data "
                "or your own code."
            )
        elif self._restarts == self._max_restarts:
            say(f"No restart: --max_restarts={self._max_restarts} is reached.")
        else:
            return True
        return False

    def _count_restart(self, what: str) -> None:
        self._restarts += 1
        say(f"Restart {self._restarts} of {self._max_restarts}: {what}.")

    def _open_log_dir(self) -> None:
        if len(self._tasks) == 1:
            return
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="ddl-logs-"))
        say(f"The output of all processes except {self._tasks[0]} is in {self._log_dir}.")

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
                f"--log_dir={self._log_dir} cannot be written: {error.strerror}. Pass another "
                "--log_dir."
            ) from error


def _badness(status: int) -> int:
    """Ranks exit statuses: the launcher exits with the one that ranks highest."""
    if status < 0:
        return 6
    order = {
        0: 0,
        TrainingInterrupted.exit_status: 1,
        WorkerLost.exit_status: 2,
        DdlError.exit_status: 4,  # a restart would end with it again
        TrainingDiverged.exit_status: 5,
    }
    return order.get(status, 3)
