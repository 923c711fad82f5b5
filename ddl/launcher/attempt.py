"""One start of all processes of a cluster, watched until the last process ends."""

import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from ddl.errors import TrainingInterrupted, WorkerLost
from ddl.launcher.messages import quote, say, show
from ddl.launcher.process import HEARD, PASSED_ON, ClusterProcess

_LAST_LINES = 20
# A dying process closes its connections before the launcher sees it end, so its peers may appear to
# end first. The kernel takes a while to free the memory of a large process.
_CAUSE_SECONDS = 3.0
# Interval between reads of the logs. A process's end or a signal wakes the launcher at once.
_LOOK_SECONDS = 0.2


def _no_successor(dead: ClusterProcess) -> None:
    """Replaces no process: when one dies, all must end."""


class ClusterAttempt:
    """A context manager for the processes of one start; on exit it kills those still running.

    The caller must block the signals in `HEARD`.

    Attributes:
      asked_to_stop: Whether SIGTERM or SIGINT was received and passed on.
    """

    def __init__(
        self,
        grace_seconds: float,
        live: bool,
        successor: Callable[[ClusterProcess], Callable[[], ClusterProcess] | None] = _no_successor,
    ):
        """Starts no process.

        Args:
          grace_seconds: Seconds between SIGTERM and SIGKILL for processes that must end.
          live: Whether to print the lines that the processes write to their logs.
          successor: Returns a function that starts the replacement of a dead process, so that the
            others continue; None if all must end.
        """
        self.asked_to_stop = False
        self._grace_seconds = grace_seconds
        self._live = live
        self._successor = successor
        self._processes: list[ClusterProcess] = []
        # Processes whose statuses count: those that ended before the launcher ended the rest.
        self._counted: list[ClusterProcess] = []
        # Ended processes not yet judged, since the process that caused their end may appear to end
        # later; and the time until which the launcher waits for that process.
        self._unjudged: list[ClusterProcess] = []
        self._judge_at = 0.0
        self._ending = False
        self._kill_at: float | None = None

    def __enter__(self) -> "ClusterAttempt":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kills the processes that are still running, and closes the logs."""
        for process in self._processes:
            process.kill()
            if process.log is not None:
                process.log.close()

    def add(self, process: ClusterProcess) -> None:
        """Adds a process that was just started."""
        self._processes.append(process)

    def watch(self) -> list[int]:
        """Waits until all processes end, and ends the rest when one dies or the chief finishes.

        Returns:
          Each `ClusterProcess.status`, in the order in which the processes ended. Processes that
          the launcher ended are left out, unless there are no others.
        """
        while self._running():
            self._answer_signal()
            ended = [process for process in self._processes if process.has_just_ended()]
            ended = [process for process in ended if not self._only_served(process)]
            self._show_new_lines()
            if ended and not self._ending:
                self._counted += ended
                if not self._unjudged:
                    self._judge_at = time.monotonic() + _CAUSE_SECONDS
                self._unjudged += ended
            if self._unjudged and not self._waits_for_cause():
                self._judge(self._unjudged)
                self._unjudged = []
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_rest(f"it did not end within {self._grace_seconds:g} s of SIGTERM")
        self._show_new_lines(to_the_end=True)
        return [
            process.status
            for process in self._counted or self._processes
            if process.status is not None
        ]

    def _running(self) -> list[ClusterProcess]:
        return [process for process in self._processes if process.is_running]

    def _answer_signal(self) -> None:
        seconds = _LOOK_SECONDS
        if self._kill_at is not None:
            seconds = max(0.0, min(seconds, self._kill_at - time.monotonic()))
        heard = signal.sigtimedwait(HEARD, seconds)
        # If the launcher was suspended past the timeout, the result is not filled in.
        if heard is None or heard.si_signo not in HEARD or heard.si_signo == signal.SIGCHLD:
            return
        if heard.si_signo in PASSED_ON:
            for process in self._running():
                process.send(signal.Signals(heard.si_signo))
            return
        if self.asked_to_stop:
            if not self._ending:
                self._counted += self._running()  # else a worker that saved would decide the status
            self._kill_rest("it was still running at the second signal")
            return
        self.asked_to_stop = True
        for process in self._running():
            process.send(signal.Signals(heard.si_signo))

    def _waits_for_cause(self) -> bool:
        """Returns whether the process that caused these ends may itself not have ended yet."""
        lost = all(map(_has_lost_another, self._unjudged))
        cause_may_run = lost and not self._ending and bool(self._running())
        return cause_may_run and time.monotonic() < self._judge_at

    def _judge(self, ended: Sequence[ClusterProcess]) -> None:
        """Ends the rest if one of these processes died, or is a chief that finished."""
        dead = [process for process in ended if self._has_died(process)]
        # If a process other than a worker died, or one lost another (WorkerLost), all must end.
        if all(one.task.kind == "worker" and not _has_lost_another(one) for one in dead):
            dead = [process for process in dead if not self._is_replaced(process)]
        for process in sorted(dead, key=_has_lost_another):
            self._report(process, "The launcher stops the other processes.")
        if dead or any(process.task.kind == "chief" for process in ended):
            self._ending = True
            self._kill_at = time.monotonic() + self._grace_seconds
            for process in self._running():
                process.send(signal.SIGTERM)

    def _only_served(self, process: ClusterProcess) -> bool:
        # When asked to stop, workers and parameter servers wait for their chief, whose status
        # counts for them. A process that is still starting dies of the signal instead.
        chiefs = [other.task.kind == "chief" for other in self._processes]
        obeyed = process.status in (-signal.SIGTERM, -signal.SIGINT)
        return self.asked_to_stop and any(chiefs) and process.task.kind != "chief" and obeyed

    def _has_died(self, process: ClusterProcess) -> bool:
        # A process that is asked to stop saves first, and not all finish at the same time.
        stopped = self.asked_to_stop and process.status == TrainingInterrupted.exit_status
        return process.status != 0 and not stopped

    def _is_replaced(self, dead: ClusterProcess) -> bool:
        start = None if self.asked_to_stop else self._successor(dead)
        if start is None:
            return False
        self._report(dead, "The launcher restarts it alone.")
        self._show_new_lines(to_the_end=True)
        if dead.log is not None:
            dead.log.close()
        self._counted.remove(dead)
        self._processes[self._processes.index(dead)] = start()
        return True

    def _kill_rest(self, why: str) -> None:
        self._ending = True
        for process in self._running():
            process.kill()
            say(f"The launcher killed {process.task}: {why}.")

    def _report(self, process: ClusterProcess, consequence: str) -> None:
        rest = f" {consequence}" if self._running() else ""
        what = f"{process.task} {process.describe_exit()}.{rest}"
        if process.log is None:
            say(f"{what} The output of {process.task} is above.")
        elif lines := process.log.last_lines(_LAST_LINES):
            say(f"{what} The last lines in {process.log.path}:")
            quote(lines)
        else:
            say(f"{what} {process.log.path} has no output of this process.")

    def _show_new_lines(self, *, to_the_end: bool = False) -> None:
        for process in self._processes:
            if self._live and process.log is not None:
                lines = process.log.new_lines(to_the_end=to_the_end)
                show(f"[{process.task}] {line}" for line in lines)


def _has_lost_another(process: ClusterProcess) -> bool:
    return process.status == WorkerLost.exit_status
