"""The processes of a sweep: each run is a process of ddl.main, several at a time.

A run is started again if its process ended by a failure of the system; it resumes from its last
checkpoint. Status 1 means an error that the user must correct, and 76 a divergence, which would
come again: such runs are reported and not restarted.
"""

import datetime
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddl.errors import (
    ConfigError,
    DdlError,
    ModelDirectoryError,
    TrainingDiverged,
    TrainingInterrupted,
)
from ddl.files import unwritable
from ddl.launcher.log import ProcessLog
from ddl.launcher.pinning import Pinning
from ddl.launcher.process import HEARD, PASSED_ON, ClusterProcess
from ddl.launcher.tasks import ClusterTask
from ddl.output import printable, say, standard_error
from ddl.sweep.definition import LOGS, RUNS
from ddl.sweep.files import ENDED, Progress, Split, progress, write_status
from ddl.sweep.halving import Decision, Halving, decide

_LOOK_SECONDS = 0.2
_LAST_LINES = 15


class Metric(NamedTuple):
    """The metric that a sweep reports.

    Attributes:
      name: Name of the metric.
      split: `eval` or `train`.
    """

    name: str
    split: Split


class _Running(NamedTuple):
    process: ClusterProcess
    place: Pinning
    rung: int | None


class Scheduler:
    """The runs of a sweep, their processes and their states.

    Attributes:
      runs: How far each run has come, by name.
      asked_to_stop: Whether SIGTERM or SIGINT was received and passed on.
      errors: Exit statuses of the runs that were given up.
    """

    def __init__(
        self,
        folder: Path,
        commands: Mapping[str, Sequence[str]],
        settings: Mapping[str, Sequence[str]],
        metric: Metric,
        halving: Halving | None,
        places: Sequence[Pinning],
        max_restarts: int,
    ):
        """Reads how far the runs have come. Starts no process.

        Args:
          folder: The folder of the sweep.
          commands: The command of each run, by its name, in the order of their starts.
          settings: The names of the runs of each setting.
          metric: The metric.
          halving: Rungs at which hopeless settings stop; None trains all to their end.
          places: The place of each process that runs at a time.
          max_restarts: How often a run is restarted after a failure of the system.
        """
        self._folder = folder
        self._commands = commands
        self._settings = settings
        self._metric = metric
        self._halving = halving
        self._free = list(places)
        self._restarts = dict.fromkeys(commands, max_restarts)
        self._running: dict[str, _Running] = {}
        self._sizes: dict[str, int] = {}  # of metrics.jsonl, as read last
        self._stopping: set[str] = set()
        self.asked_to_stop = False
        self.errors: dict[str, int] = {}
        self.runs: dict[str, Progress] = {name: self._read(name) for name in commands}

    def run(self) -> None:
        """Starts the runs and waits until the last one ends. Main thread only.

        The first SIGTERM or SIGINT is passed on, so that the runs save; a second one kills them.

        Raises:
          ConfigError: If a log cannot be written.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses are lost
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            self._start_what_may()
            while self._running:
                self._answer_signal()
                self._stop_at_rungs()
                for name in [n for n, one in self._running.items() if one.process.has_just_ended()]:
                    self._judge(name)
                self._start_what_may()
        finally:
            for one in self._running.values():
                _end(one)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def decisions(self) -> dict[str, Decision]:
        """Returns the decision of successive halving for each run."""
        return decide(self._settings, self.runs, self._halving)

    def folder_of(self, name: str) -> Path:
        """Returns the model directory of a run."""
        return self._folder / RUNS / name

    def _read(self, name: str) -> Progress:
        return progress(self.folder_of(name), self._metric.name, self._metric.split)

    def _start_what_may(self) -> None:
        if self.asked_to_stop or not self._free:
            return
        # A signal that has just arrived must not wait until a further run has started.
        decisions = self.decisions()
        for name, (action, rung) in decisions.items():
            if not self._free:
                return
            if action == "train" and name not in self._running and not self.runs[name].over:
                self._start(name, rung)

    def _start(self, name: str, rung: int | None) -> None:
        folder, place = self.folder_of(name), self._free.pop(0)
        now = datetime.datetime.now().isoformat(" ", "seconds")
        path = self._folder / LOGS / f"{name}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (folder / ENDED).unlink(missing_ok=True)
            log = ProcessLog(path, f"--- {name}, {now} ---")
        except OSError as error:
            raise ConfigError(unwritable(path, error)) from error
        # Unbuffered output reaches the log line by line, and a kill loses none of it.
        environment = {"PYTHONUNBUFFERED": "1", **os.environ}
        environment.pop("TF_CONFIG", None)  # each run is alone
        process = ClusterProcess(
            ClusterTask(name, 0), self._commands[name], environment, place, log
        )
        self._running[name] = _Running(process, place, rung)
        saved = self.runs[name].saved
        ends = sum(one.over for one in self.runs.values())
        until = "" if rung is None else f", up to the rung at step {rung:,}"
        resumes = " starts" if saved is None else f" resumes from step {saved:,}"
        say(f"{name}{resumes}{until} ({ends} of {len(self.runs)} runs have ended).")

    def _answer_signal(self) -> None:
        heard = signal.sigtimedwait(HEARD, _LOOK_SECONDS)
        # If the sweep was suspended past the timeout, the result is not filled in.
        if heard is None or heard.si_signo not in HEARD or heard.si_signo == signal.SIGCHLD:
            return
        number = signal.Signals(heard.si_signo)
        if number in PASSED_ON:
            for one in self._running.values():
                one.process.send(number)
            return
        if self.asked_to_stop:
            say("The runs that were still saving are killed at the second signal.")
            for one in self._running.values():
                one.process.send(signal.SIGKILL)
            return
        self.asked_to_stop = True
        say(f"{number.name}: the runs save and stop. A second signal kills them.")
        for name, one in self._running.items():
            if name not in self._stopping:  # a second signal would kill the run
                one.process.send(number)

    def _stop_at_rungs(self) -> None:
        for name, one in self._running.items():
            if one.rung is None or name in self._stopping:
                continue
            try:
                size = (self.folder_of(name) / "metrics.jsonl").stat().st_size
            except OSError:
                continue
            if size == self._sizes.get(name):
                continue
            self._sizes[name] = size
            if self._read(name).at(one.rung) is not None and not self.asked_to_stop:
                self._stopping.add(name)
                one.process.send(signal.SIGTERM)

    def _judge(self, name: str) -> None:
        """Reads a run whose process has ended, and decides whether it failed."""
        one = self._running.pop(name)
        self._free.insert(0, one.place)
        status, stopped = one.process.status, name in self._stopping
        assert status is not None
        self._stopping.discard(name)
        self._sizes.pop(name, None)
        interrupted = self.asked_to_stop or stopped
        saved = status == TrainingInterrupted.exit_status
        if status in (0, TrainingDiverged.exit_status) and self.folder_of(name).is_dir():
            try:
                write_status(self.folder_of(name), status)
            except ModelDirectoryError as error:  # the other runs go on
                say(str(error))
        found = self.runs[name] = self._read(name)
        if status == 0 and found.finished:
            say(f"{name} has finished: {self._figure(found)}.")
        elif found.diverged:
            say(f"{name} diverged. It is not restarted, since it would diverge again.")
        elif saved and stopped:
            say(f"{name} has reached the rung at step {one.rung:,}: {self._figure(found)}.")
        elif saved and self.asked_to_stop:
            say(f"{name} has stopped at step {found.saved or 0:,}.")
        elif interrupted and status not in (DdlError.exit_status, 0):
            say(f"{name} {one.process.describe_exit()} before it saved.")
        else:
            self._give_up_or_restart(name, status, one)
        if one.process.log is not None:
            one.process.log.close()

    def _give_up_or_restart(self, name: str, status: int, one: _Running) -> None:
        lines = one.process.log.last_lines(_LAST_LINES) if one.process.log is not None else []
        what = f"{name} {one.process.describe_exit()}"
        final = (0, DdlError.exit_status, TrainingDiverged.exit_status)
        if status not in final and self._restarts[name] > 0:
            self._restarts[name] -= 1
            say(f"{what}. It is restarted.")
            return
        if status == DdlError.exit_status:
            rest = "an error in flags, config, data or your own code. It is not restarted"
            what = f"{what}, {rest}"
        self.errors[name] = status
        self.runs[name].failed = True
        say(f"{what}. The last lines of {self._folder / LOGS / f'{name}.log'}:")
        stream = standard_error()
        stream.writelines(f"  {printable(line)}\n" for line in lines)
        stream.flush()

    def _figure(self, found: Progress) -> str:
        value = found.last
        return f"{self._metric.name} {'none' if value is None else format(value, '.6g')}"


def _end(one: _Running) -> None:
    one.process.kill()
    if one.process.log is not None:
        one.process.log.close()


def command_of(name: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Returns the command of a run.

    Args:
      name: Name of the run.
      folder: The folder of the sweep.
      arguments: Flags of ddl.main without --model_dir.
    """
    model_dir = folder / RUNS / name
    return [sys.executable, "-m", "ddl.main", *arguments, f"--model_dir={model_dir}"]
