"""One start of all processes of a cluster, watched until the last of them has ended."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from ddl.cluster_process import HEARD, ClusterProcess
from ddl.errors import TrainingInterrupted, WorkerLost

_LAST_LINES = 20
# A process that dies closes its connections before its end can be seen: those that it leaves may
# be seen to end first. Giving back all memory of a large one takes the kernel a while.
_CAUSE_SECONDS = 3.0
# How often logs are looked at. An end and a signal wake the launcher at once.
_LOOK_SECONDS = 0.2


def say(text: str) -> None:
    """A line of the launcher's own."""
    print(f"ddl-launch: {text}", file=sys.stderr, flush=True)


def _no_successor(dead: ClusterProcess) -> None:
    """All have to end when one dies."""


class ClusterAttempt:
    """Within the `with` block processes run; after it none does.

    The signals in `HEARD` have to be blocked.

    Attributes:
      asked_to_stop: Whether SIGTERM or SIGINT came, and was passed on.
    """

    def __init__(
        self,
        grace_seconds: float,
        live: bool,
        successor: Callable[[ClusterProcess], Callable[[], ClusterProcess] | None] = _no_successor,
    ):
        """Nothing runs yet.

        Args:
          grace_seconds: Time between SIGTERM and SIGKILL for what has to end.
          live: Shows what the processes write to their logs, line by line.
          successor: Says what starts a process in the place of one that died, so that the others go
            on; None if they have to end.
        """
        self.asked_to_stop = False
        self._grace_seconds = grace_seconds
        self._live = live
        self._successor = successor
        self._processes: list[ClusterProcess] = []
        # Those that ended by themselves, or of what was not the launcher's doing.
        self._counted: list[ClusterProcess] = []
        # Those of them that were not judged yet, since the one that caused it may be seen to end
        # after them; and until when that is waited for.
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
        """Kills what is still running."""
        for process in self._processes:
            process.kill()
            if process.log is not None:
                process.log.close()

    def add(self, process: ClusterProcess) -> None:
        """Takes a process over that has just been started."""
        self._processes.append(process)

    def watch(self) -> list[int]:
        """Waits for the end of all, and ends the rest when one dies or the chief is done.

        Returns:
          How they ended, as `ClusterProcess.status`, the first to end first; without those that
          were ended here, unless there are no others.
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
                self._kill_rest(f"did not end within {self._grace_seconds:g} s of SIGTERM")
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
        # Stopped and gone on with past its time, it gives what it never filled in.
        if heard is None or heard.si_signo not in HEARD or heard.si_signo == signal.SIGCHLD:
            return
        if self.asked_to_stop:
            if not self._ending:
                self._counted += self._running()  # or a saved worker would speak for them
            self._kill_rest("was still running at the second signal")
            return
        self.asked_to_stop = True
        for process in self._running():
            process.send(signal.Signals(heard.si_signo))

    def _waits_for_cause(self) -> bool:
        """Whether one may be about to end whose death is why all these have ended."""
        lost = all(map(_has_lost_another, self._unjudged))
        cause_may_run = lost and not self._ending and bool(self._running())
        return cause_may_run and time.monotonic() < self._judge_at

    def _judge(self, ended: Sequence[ClusterProcess]) -> None:
        """Ends the rest if one of these has died, or is a chief that needs the others no more."""
        dead = [process for process in ended if self._has_died(process)]
        # One that lost another is not replaced, nor is a chief: with them all have to end.
        if all(one.task.kind == "worker" and not _has_lost_another(one) for one in dead):
            dead = [process for process in dead if not self._is_replaced(process)]
        for process in sorted(dead, key=_has_lost_another):
            self._report(process, "the rest is ended")
        if dead or any(process.task.kind == "chief" for process in ended):
            self._ending = True
            self._kill_at = time.monotonic() + self._grace_seconds
            for process in self._running():
                process.send(signal.SIGTERM)

    def _only_served(self, process: ClusterProcess) -> bool:
        # Asked to stop, workers and parameter servers wait for their chief, which speaks for them.
        # One that is starting does not yet, and ends of the signal.
        chiefs = [other.task.kind == "chief" for other in self._processes]
        obeyed = process.status in (-signal.SIGTERM, -signal.SIGINT)
        return self.asked_to_stop and any(chiefs) and process.task.kind != "chief" and obeyed

    def _has_died(self, process: ClusterProcess) -> bool:
        # Who was asked to stop saves first, and not all are done with it at once.
        stopped = self.asked_to_stop and process.status == TrainingInterrupted.exit_status
        return process.status != 0 and not stopped

    def _is_replaced(self, dead: ClusterProcess) -> bool:
        start = None if self.asked_to_stop else self._successor(dead)
        if start is None:
            return False
        self._report(dead, "it is started again, and the rest goes on")
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
            say(f"{process.task} {why}, and was killed")

    def _report(self, process: ClusterProcess, consequence: str) -> None:
        rest = f"; {consequence}" if self._running() else ""
        what = f"{process.task} {process.how_it_ended()}{rest}."
        if process.log is None:
            say(f"{what} Its output stands above.")  # shown already: not a second time
        elif lines := process.log.last_lines(_LAST_LINES):
            say(f"{what} Its last lines in {process.log.path}:")
            print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
        else:
            say(f"{what} It wrote nothing.")

    def _show_new_lines(self, *, to_the_end: bool = False) -> None:
        for process in self._processes:
            if self._live and process.log is not None:
                for line in process.log.new_lines(to_the_end=to_the_end):
                    print(f"[{process.task}] {line}", flush=True)


def _has_lost_another(process: ClusterProcess) -> bool:
    return process.status == WorkerLost.exit_status
