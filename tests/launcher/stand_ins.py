"""Processes of a cluster that are none: a script says when each ends and which signals come."""

import signal
import types
from collections.abc import Sequence
from typing import Any

from ddl.launcher import attempt, cluster
from ddl.launcher.process import HEARD, ClusterProcess

Event = tuple[str, int] | signal.Signals


class StandIn(ClusterProcess):
    """A process that ends by an event of the script, or of the signals that it does not ignore.

    Attributes:
      environment: The environment that it was started with.
      received: Signals sent to it.
    """

    def __init__(self, script: "Script", task, command, environment, pinning, log):
        self.task, self.log, self.status = task, log, None
        self.script, self.environment = script, environment
        self.received: list[int] = []
        self.ends_with: int | None = None
        script.started.append(self)

    def has_just_ended(self) -> bool:
        if self.status is None and self.ends_with is not None:
            self.status = self.ends_with
            return True
        return False

    def send(self, number: signal.Signals) -> None:
        self.received.append(number)
        if number in (signal.SIGTERM, signal.SIGINT):
            self.ends_with = self.script.on_signal.get(str(self.task), -number)

    def kill(self) -> None:
        if self.status is None:
            self.received.append(signal.SIGKILL)
            self.status = -signal.SIGKILL


class Script:
    """What happens to a cluster, one event each time the launcher waits; then nothing.

    An event is the name and the exit status of a process that ends, or a signal to the launcher.
    Processes end of SIGTERM and SIGINT, but for those in `on_signal`: by status, or never if None.
    """

    def __init__(self, events: Sequence[Event], on_signal: dict[str, int | None] | None = None):
        self.events = list(events)
        self.on_signal = on_signal or {}
        self.started: list[StandIn] = []
        self.now = 0.0

    def process(self, name: str) -> StandIn:
        """Returns the newest process of a task."""
        return next(one for one in reversed(self.started) if str(one.task) == name)

    def wait(self, numbers: Sequence[int], seconds: float) -> Any:
        """Stands in for `signal.sigtimedwait`."""
        if tuple(numbers) != HEARD:  # whether a signal came after the last end
            return None
        self.now += max(seconds, 0.001)
        assert self.now < 1000, "the launcher waits for ever"
        if not self.events:
            return None
        event = self.events.pop(0)
        if isinstance(event, signal.Signals):
            return types.SimpleNamespace(si_signo=event)
        name, status = event
        self.process(name).ends_with = status
        return types.SimpleNamespace(si_signo=signal.SIGCHLD)

    def play(self, monkeypatch, log_dir, workers=2, servers=0, **options) -> int:
        """Runs a cluster by the script, and returns its exit status."""

        def start(*arguments):
            return StandIn(self, *arguments)

        monkeypatch.setattr(cluster, "ClusterProcess", start)
        monkeypatch.setattr(attempt.signal, "sigtimedwait", self.wait)
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(attempt, "time", clock)
        return cluster.Cluster(["command"], workers, servers, log_dir=log_dir, **options).run()
