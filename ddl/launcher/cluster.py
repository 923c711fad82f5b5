"""A cluster on one machine: one process for each task, all restarted when one of them dies.

Restarting is enough because a run resumes exactly from its last checkpoint. With parameter servers,
a worker that dies is restarted alone: the parameter servers hold the weights, and the others
continue.
"""

import math
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from ddl.errors import DdlError, TrainingDiverged, TrainingInterrupted, WorkerLost
from ddl.launcher.gpus import with_a_gpu_each
from ddl.launcher.process import HEARD, ClusterProcess
from ddl.launcher.tasks import ClusterTask, cluster_tasks, free_ports, tf_configs
from ddl.output import say

_STOPPED, _LOST = TrainingInterrupted.exit_status, WorkerLost.exit_status
# Statuses that follow from the launcher's SIGTERM.
_OBEYED = (0, _STOPPED, _LOST, -signal.SIGTERM)
# From the best to the worst, where None is any other status and then signals follow. After status 1
# a restart would end with it again.
_STATUSES = [0, _STOPPED, _LOST, None, DdlError.exit_status, TrainingDiverged.exit_status]
# Seconds between SIGTERM and SIGKILL for processes that must end.
_GRACE_SECONDS = 10.0


class Cluster:
    """A cluster whose tasks all run the same command.

    The first task writes to the launcher's output itself. The output of the others goes to standard
    error, with the task before each line.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        num_ps: int = 0,
        *,
        max_restarts: int = 0,
        pin_gpus: bool = False,
        checkpoints: Path | None = None,
    ):
        """Assigns GPUs to the tasks. Starts no process.

        Args:
          command: The command of each process; TF_CONFIG in its environment names its task.
          num_workers: Number of workers.
          num_ps: Number of parameter servers. With at least one there is also a chief.
          max_restarts: Maximum number of restarts, of all tasks or of one worker alone, since the
            step of the newest checkpoint last grew.
          pin_gpus: Whether each worker gets a GPU of its own.
          checkpoints: Folder of the run's checkpoints; None if there is none to look at.

        Raises:
          ConfigError: If there are not enough GPUs.
        """
        self._command = command
        tasks = cluster_tasks(num_workers, num_ps)
        self._tasks = with_a_gpu_each(tasks) if pin_gpus else tasks
        self._has_servers = num_ps > 0
        self._max_restarts = max_restarts
        self._checkpoints = checkpoints
        self._restarts = 0
        self._step = newest_step(checkpoints)

    def run(self) -> int:
        """Starts the processes and waits until the last one ends. Main thread only.

        The first SIGTERM or SIGINT is passed on; a second one kills all processes.

        Returns:
          The worst exit status; 128 plus the signal's number if a signal killed that process.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses are lost
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            while True:
                worst = self._run_once()
                if self._asked_to_stop or not self._may_restart(worst, "all processes"):
                    return worst if worst >= 0 else 128 - worst
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run_once(self) -> int:
        """Returns the worst status of one start, without those that the launcher brought about."""
        self._asked_to_stop, self._ending, self._kill_at = False, False, math.inf
        self._statuses: list[int] = []
        self._configs = tf_configs(self._tasks, free_ports(len(self._tasks)))
        self._processes: list[ClusterProcess] = []
        try:
            for index in range(len(self._tasks)):
                self._processes.append(self._start(index))
            while running := self._running():
                self._answer_signal()
                for process in running:
                    if process.has_just_ended():
                        self._judge(process)
                    process.show_output()
                if time.monotonic() >= self._kill_at:
                    self._kill_rest(f"it did not end within {_GRACE_SECONDS:g} s")
        finally:
            for process in self._processes:
                process.kill()
        return max(self._statuses, key=badness)

    def _start(self, index: int) -> ClusterProcess:
        return ClusterProcess(self._tasks[index], self._command, self._configs[index], index > 0)

    def _running(self) -> list[ClusterProcess]:
        return [process for process in self._processes if process.status is None]

    def _answer_signal(self) -> None:
        # Up to the next read of the output; a process's end or a signal wakes it at once.
        heard = signal.sigtimedwait(HEARD, 0.1)
        # If the launcher was suspended past the timeout, the result holds no signal's number.
        number = 0 if heard is None else heard.si_signo
        stops = number in (signal.SIGTERM, signal.SIGINT)
        if stops and self._asked_to_stop:
            self._statuses.append(-signal.SIGKILL)  # else a worker that saved would decide it
            self._kill_rest("it was still running at the second signal")
        elif stops or number == signal.SIGQUIT:
            self._asked_to_stop |= stops
            for process in self._running():
                process.send(number)

    def _judge(self, process: ClusterProcess) -> None:
        """Restarts a worker of parameter servers that died; else ends the rest."""
        status, task = process.status or 0, process.task
        if self._is_consequence(task, status):
            return
        # A process that is asked to stop saves first, and not all finish at the same time.
        died = status != 0 and not (self._asked_to_stop and status == _STOPPED)
        if died:
            say(f"{task} {process.describe_exit()}.")
        alone = self._has_servers and task.kind == "worker" and status != _LOST and not self._ending
        if alone and not self._asked_to_stop and self._may_restart(status, f"{task} alone"):
            index = self._tasks.index(task)
            self._processes[index] = self._start(index)
            return
        self._statuses.append(status)
        if (died or task.kind == "chief") and not self._ending:
            self._ending, self._kill_at = True, time.monotonic() + _GRACE_SECONDS
            # Workers stop together: a signal could end one that has saved and is about to say so.
            if self._has_servers or status != _STOPPED:
                for other in self._running():
                    other.send(signal.SIGTERM)

    def _is_consequence(self, task: ClusterTask, status: int) -> bool:
        """Returns whether the launcher, or a process that ended before, brought about this end."""
        if self._ending:
            # A dying process closes its connections before its end is seen, so that one that lost
            # another may appear to end before the one that it lost, whose status counts too.
            return status in _OBEYED or {*self._statuses} != {_LOST}
        # When asked to stop, workers and parameter servers wait for their chief, whose status
        # counts for them. A process that is still starting dies of the signal instead.
        of_chief = self._has_servers and task.kind != "chief"
        return self._asked_to_stop and of_chief and status in (-signal.SIGTERM, -signal.SIGINT)

    def _kill_rest(self, why: str) -> None:
        self._ending = True
        for process in self._running():
            process.kill()
            say(f"The launcher killed {process.task}: {why}.")

    def _may_restart(self, status: int, what: str) -> bool:
        """Returns whether to restart after this status; counts the restart, or says why not."""
        if status == 0 or self._max_restarts == 0:
            return False
        step = newest_step(self._checkpoints)
        if step > self._step:
            self._step, self._restarts = step, 0
        if status == TrainingDiverged.exit_status:
            say("No restart: training diverged and would diverge again.")
        elif status == DdlError.exit_status:
            say("No restart: status 1 means an error in flags, config, data or your own code.")
        elif self._restarts == self._max_restarts:
            say(f"No restart: --max_restarts={self._max_restarts} made no newer checkpoint.")
        else:
            self._restarts += 1
            say(f"Restart {self._restarts} of {self._max_restarts}: {what}.")
            return True
        return False


def newest_step(checkpoints: Path | None) -> int:
    """Returns the step of the newest checkpoint in a folder; -1 if there is none."""
    files = [] if checkpoints is None else checkpoints.glob("*.index")
    steps = (re.search(r"(\d+)\.index$", file.name) for file in files)
    return max((int(step[1]) for step in steps if step), default=-1)


def badness(status: int) -> int:
    """Ranks exit statuses: the launcher exits with the one that ranks highest."""
    known = status if status in _STATUSES else None
    return len(_STATUSES) if status < 0 else _STATUSES.index(known)
