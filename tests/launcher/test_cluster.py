"""What becomes of a cluster when processes end and signals come, without processes."""

import json
import signal
import types
from pathlib import Path

import pytest

from ddl.launcher import cluster
from ddl.launcher.process import HEARD, ClusterProcess

KILLED = -signal.SIGKILL


class StandIn(ClusterProcess):
    """A process that ends by an event of the script, or of the signals that it does not ignore."""

    def __init__(self, script, task, tf_config, prefixed):
        self.task, self.status, self.ends_with = task, None, None
        self.script, self.prefixed, self.received = script, prefixed, []
        self.config = json.loads(tf_config)
        script.started.append(self)

    def has_just_ended(self):
        if self.status is None and self.ends_with is not None:
            self.status = self.ends_with
            return True
        return False

    def send(self, number):
        self.received.append(number)
        if number in (signal.SIGTERM, signal.SIGINT):
            self.ends_with = self.script.on_signal.get(str(self.task), -number)

    def kill(self):
        if self.status is None:
            self.received.append(signal.SIGKILL)
            self.status = KILLED

    def show_output(self):
        return False


class Script:
    """What happens to a cluster, one event each time the launcher waits; then nothing.

    An event is the name and the exit status of a process that ends, or a signal to the launcher.
    Processes end of SIGTERM and SIGINT, but for those in `on_signal`: by status, or never if None.
    """

    def __init__(self, events, on_signal):
        self.events, self.on_signal = list(events), on_signal
        self.started, self.now = [], 0.0

    def process(self, name):
        """Returns the newest process of a task."""
        return next(one for one in reversed(self.started) if str(one.task) == name)

    def wait(self, numbers, seconds):
        """Stands in for `signal.sigtimedwait`."""
        assert tuple(numbers) == HEARD
        self.now += seconds
        assert self.now < 1000, "the launcher waits for ever"
        if not self.events:
            return None
        event = self.events.pop(0)
        if not isinstance(event, signal.Signals):
            name, status = event
            self.process(name).ends_with, event = status, signal.SIGCHLD
        return types.SimpleNamespace(si_signo=event)


@pytest.fixture
def play(monkeypatch):
    """A function that plays a script, and returns the status of the cluster and the script."""

    def play(*events, on_signal=None, workers=2, servers=0, **options):
        script = Script(events, on_signal or {})

        def start(task, command, tf_config, prefixed):
            return StandIn(script, task, tf_config, prefixed)

        monkeypatch.setattr(cluster, "ClusterProcess", start)
        monkeypatch.setattr(cluster.signal, "sigtimedwait", script.wait)
        monkeypatch.setattr(cluster, "time", types.SimpleNamespace(monotonic=lambda: script.now))
        return cluster.Cluster(["command"], workers, servers, **options).run(), script

    return play


# ------------------------------------------------------------ one dies


def test_one_that_ignores_sigterm_is_killed_after_the_grace(play, capsys):
    status, script = play(("worker 1", 3), on_signal={"worker 0": None})
    assert status == 3
    assert script.process("worker 0").received == [signal.SIGTERM, signal.SIGKILL]
    assert "killed worker 0: it did not end within 10 s." in capsys.readouterr().err


def test_workers_that_stop_together_get_no_signal(play):
    """A signal would end one that has saved before it says so."""
    status, script = play(("worker 1", 75), signal.SIGQUIT, ("worker 0", 75))
    assert status == 75
    assert signal.SIGTERM not in script.process("worker 0").received


# ------------------------------------------------------------ restarts


@pytest.mark.parametrize("status", [KILLED, -signal.SIGTERM, 3, 70, 77])
def test_a_restart_and_all_is_well(play, capsys, status):
    again = ("worker 0", 0), ("worker 1", 0)
    ended, script = play(("worker 1", status), *[signal.SIGQUIT] * 3, *again, max_restarts=3)
    assert ended == 0
    assert len(script.started) == 4
    assert script.started[0].config["cluster"] != script.started[2].config["cluster"]
    assert "Restart 1 of 3: all processes.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "restarts", "why"),
    [(3, 0, ""), (3, 1, "max_restarts=1"), (1, 2, "an error in flags"), (76, 2, "diverged")],
)
def test_no_restart_where_it_is_not_wanted_or_makes_no_sense(play, capsys, status, restarts, why):
    deaths = [("worker 1", status), signal.SIGQUIT] * 3
    ended, script = play(*deaths, max_restarts=restarts)
    assert ended == status
    assert len(script.started) == (4 if restarts == 1 else 2)
    errors = capsys.readouterr().err
    assert why in errors
    assert ("No restart: " in errors) == bool(why)


def test_restarts_count_anew_when_the_newest_step_grows(play, monkeypatch):
    found = iter([-1, 4, 8, 8, 8])
    monkeypatch.setattr(cluster, "newest_step", lambda checkpoints: next(found))
    status, script = play(*[("worker 1", 3), signal.SIGQUIT] * 4, max_restarts=1)
    assert status == 3
    assert len(script.started) == 6  # at the third death in a row no newer checkpoint is there


def test_a_worker_of_parameter_servers_is_restarted_alone(play, capsys):
    status, script = play(("worker 1", KILLED), ("chief", 0), servers=1, max_restarts=1)
    assert status == 0
    assert [str(one.task) for one in script.started[4:]] == ["worker 1"]
    first, second = (one for one in script.started if str(one.task) == "worker 1")
    assert first.config == second.config
    assert "Restart 1 of 1: worker 1 alone." in capsys.readouterr().err


def test_ports_differ_and_no_outgoing_connection_can_take_one():
    chosen = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = cluster.free_ports(64)
    assert len({*ports}) == 64
    assert max(ports) < chosen


# ------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_all_and_nothing_restarts(play, capsys, number):
    saves = {"worker 0": 75, "worker 1": 75}
    status, script = play(number, on_signal=saves, max_restarts=3)
    assert status == 75
    assert [process.received for process in script.started] == [[number]] * 2
    assert capsys.readouterr().err == ""
