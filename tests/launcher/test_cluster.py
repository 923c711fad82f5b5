"""What becomes of a cluster when processes end and signals come, without processes."""

import json
import re
import signal
import types

import pytest

from ddl.errors import ConfigError
from ddl.launcher import cluster
from ddl.launcher.log import ProcessLog
from tests.launcher.stand_ins import Script

KILLED = -signal.SIGKILL


@pytest.fixture
def play(monkeypatch, tmp_path):
    """A function that plays a script, and returns the status of the cluster and the script."""

    def play(*events, on_signal=None, **options):
        script = Script(events, on_signal)
        return script.play(monkeypatch, tmp_path / "logs", **options), script

    return play


# ------------------------------------------------------------ tasks


def configs(script) -> dict[str, dict]:
    return {
        str(process.task): json.loads(process.environment["TF_CONFIG"])
        for process in script.started
    }


def test_each_worker_knows_its_task_and_all_addresses(play):
    status, script = play(("worker 0", 0), ("worker 1", 0), ("worker 2", 0), workers=3)
    found = configs(script)
    assert status == 0
    assert [one["task"] for one in found.values()] == [
        {"type": "worker", "index": index} for index in range(3)
    ]
    addresses = found["worker 0"]["cluster"]["worker"]
    assert len({*addresses}) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    assert all(one["cluster"] == {"worker": addresses} for one in found.values())


def test_parameter_servers_come_with_a_chief(play):
    status, script = play(("chief", 0), workers=2, servers=1)
    assert status == 0
    found = configs(script)
    assert [*found] == ["chief", "worker 0", "worker 1", "ps 0"]
    sizes = {kind: len(each) for kind, each in found["ps 0"]["cluster"].items()}
    assert sizes == {"chief": 1, "worker": 2, "ps": 1}


# ------------------------------------------------------------ one dies


def test_when_one_dies_the_rest_is_ended_and_the_dead_is_named(play, capsys):
    status, script = play(("worker 1", 3), workers=3)
    assert status == 3
    assert script.process("worker 0").received == [signal.SIGTERM]
    errors = capsys.readouterr().err
    assert "worker 1 ended with status 3. The launcher stops the other processes." in errors
    assert "worker 0 " not in errors.replace("all processes except worker 0", "")


def test_one_that_was_killed_is_named_by_its_signal(play, capsys):
    status, _ = play(("ps 0", KILLED), workers=1, servers=1)
    assert status == 128 + signal.SIGKILL
    assert "ps 0 was killed by SIGKILL" in capsys.readouterr().err


def test_the_one_that_was_lost_is_named_first_though_its_end_is_seen_later(play, capsys):
    status, _ = play(("worker 1", 77), ("worker 2", 77), ("worker 0", KILLED), workers=3)
    assert status == 128 + signal.SIGKILL
    errors = capsys.readouterr().err
    assert errors.index("worker 0 was killed by SIGKILL") < errors.index("worker 1 ended with")


def test_one_that_lost_another_which_never_ends_ends_all_soon(play):
    status, script = play(("worker 1", 77))
    assert status == 77
    assert script.process("worker 0").received == [signal.SIGTERM]
    assert script.now < 10


def test_one_that_ignores_sigterm_is_killed_after_the_grace(play, capsys):
    status, script = play(("worker 1", 3), on_signal={"worker 0": None}, grace_seconds=0.5)
    assert status == 3
    assert script.process("worker 0").received == [signal.SIGTERM, signal.SIGKILL]
    assert "killed worker 0: it did not end within 0.5 s of SIGTERM." in capsys.readouterr().err


def test_those_that_are_done_wait_for_the_others(play):
    status, script = play(("worker 0", 0), *[signal.SIGQUIT] * 50, ("worker 1", 0))
    assert status == 0
    assert script.process("worker 1").received == [signal.SIGQUIT] * 50


def test_a_chief_that_is_done_ends_the_others(play):
    status, script = play(("chief", 0), workers=1, servers=1)
    assert status == 0
    assert script.process("ps 0").received == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [([0, 75], 75), ([77, 75], 77), ([77, 1, 75], 1), ([77, 3, 0], 3), ([1, 76], 76)],
    ids=str,
)
def test_the_worst_status_is_that_of_the_whole(statuses, worst):
    assert max(statuses, key=cluster._badness) == worst


# ------------------------------------------------------------ restarts


@pytest.mark.parametrize("status", [KILLED, -signal.SIGTERM, 3, 70, 75, 77])
def test_a_restart_and_all_is_well(play, capsys, tmp_path, status):
    again = ("worker 0", 0), ("worker 1", 0)
    events = ("worker 1", status), *[signal.SIGQUIT] * 20, *again
    ended, script = play(*events, max_restarts=3)
    assert ended == 0
    assert len(script.started) == 4
    ports = [one.environment["TF_CONFIG"] for one in script.started[::2]]
    assert ports[0] != ports[1]
    assert "Restart 1 of 3: all processes.\n" in capsys.readouterr().err
    headings = (tmp_path / "logs/worker-1.log").read_text()
    assert "worker 1, start, " in headings
    assert "worker 1, restart 1, " in headings


def test_as_many_restarts_as_are_allowed(play, capsys):
    status, script = play(*[("worker 1", 3), signal.SIGQUIT] * 3, max_restarts=2)
    assert status == 3
    assert len(script.started) == 6
    assert "No restart: --max_restarts=2 is reached." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "restarts", "why"),
    [(3, 0, ""), (1, 2, "an error in flags"), (76, 2, "diverged")],
)
def test_no_restart_where_it_is_not_wanted_or_makes_no_sense(play, capsys, status, restarts, why):
    ended, script = play(("worker 1", status), max_restarts=restarts)
    assert ended == status
    assert len(script.started) == 2
    errors = capsys.readouterr().err
    assert why in errors
    assert ("No restart: " in errors) == bool(why)


def test_a_worker_of_parameter_servers_is_restarted_alone(play, capsys):
    status, script = play(("worker 1", KILLED), ("chief", 0), servers=1, max_restarts=1)
    assert status == 0
    assert [str(one.task) for one in script.started[4:]] == ["worker 1"]
    first, second = (one for one in script.started if str(one.task) == "worker 1")
    assert first.environment["TF_CONFIG"] == second.environment["TF_CONFIG"]
    assert "Restart 1 of 1: worker 1 alone." in capsys.readouterr().err


@pytest.mark.parametrize(("dies", "status"), [("worker 1", 1), ("worker 1", 77), ("ps 0", 3)])
def test_an_end_that_ends_a_cluster_with_parameter_servers(play, capsys, dies, status):
    """An error in flags, a worker that lost another process, a parameter server."""
    events = (dies, status), *[signal.SIGQUIT] * 20, (dies, status)
    ended, _ = play(*events, servers=1, max_restarts=1)
    assert ended == status
    assert "alone" not in capsys.readouterr().err


# ------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_all_and_nothing_restarts(play, capsys, number):
    saves = {"worker 0": 75, "worker 1": 75}
    status, script = play(number, on_signal=saves, max_restarts=3)
    assert status == 75
    assert [process.received for process in script.started] == [[number]] * 2
    errors = capsys.readouterr().err.lower()
    assert "restart" not in errors
    assert "ended" not in errors


def test_requests_for_stacks_are_passed_on_and_end_nothing(play):
    ends = ("worker 0", 0), ("worker 1", 0)
    status, script = play(signal.SIGQUIT, *ends)
    assert status == 0
    received = [process.received for process in script.started]
    assert received == [[signal.SIGQUIT]] * 2


def test_who_still_saves_is_not_disturbed_by_who_is_done(play):
    """A second SIGTERM would end ddl.main at once."""
    saves = {"worker 0": None, "worker 1": 75}
    waits = [signal.SIGQUIT] * 100
    status, script = play(
        signal.SIGTERM, *waits, ("worker 0", 75), on_signal=saves, grace_seconds=0.1
    )
    assert status == 75
    assert {*script.process("worker 0").received} == {signal.SIGTERM, signal.SIGQUIT}


def test_a_second_signal_kills_all(play, capsys):
    saves = {"worker 0": None, "worker 1": 75}
    status, _ = play(signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, on_signal=saves)
    assert status == 128 + signal.SIGKILL  # and not that of the one that was able to save
    assert "killed worker 0: it was still running at the second signal." in capsys.readouterr().err


def test_a_chief_that_saves_speaks_for_those_that_end_of_the_signal(play):
    status, _ = play(signal.SIGTERM, on_signal={"chief": 75}, workers=1, servers=1)
    assert status == 75


def test_one_that_dies_while_all_stop_ends_the_rest(play, capsys):
    stops = {"worker 0": None, "worker 1": 3}
    status, script = play(signal.SIGTERM, on_signal=stops, max_restarts=1)
    assert status == 3
    assert script.process("worker 0").received[-1] == signal.SIGKILL
    assert "restart" not in capsys.readouterr().err.lower()


# ------------------------------------------------------------ logs


def test_a_cluster_of_one_process_has_no_logs(play, tmp_path, capsys):
    assert play(("worker 0", 0), workers=1)[0] == 0
    assert not (tmp_path / "logs").exists()
    assert capsys.readouterr().err == ""


def test_logs_that_cannot_be_written_are_an_error(play, tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ConfigError, match="--log_dir=.* cannot be written"):
        play()


def test_the_last_lines_are_those_of_the_last_start(tmp_path):
    for lines in (30, 3):
        log = ProcessLog(tmp_path / "worker-1.log", "start")
        log.writing.write(b"".join(b"%d of %d\n" % (line, lines) for line in range(lines)))
        assert log.last_lines(20) == [f"{line} of {lines}" for line in range(lines)][-20:]
        log.close()


def test_lines_are_shown_once_and_whole(tmp_path):
    log = ProcessLog(tmp_path / "worker-1.log", "start")
    log.writing.write(b"first\nsec")
    assert log.new_lines() == ["first"]
    log.writing.write(b"ond\nno end")
    assert log.new_lines() == ["second"]
    assert log.new_lines(to_the_end=True) == ["no end"]
    log.close()


def test_a_full_disk_does_not_end_a_restart(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    unwritable = types.SimpleNamespace(write=full, fileno=(tmp_path / "x").open("wb").fileno)
    monkeypatch.setattr("builtins.open", lambda *_, **__: unwritable)
    with monkeypatch.context():
        (tmp_path / "worker-1.log").touch()
        ProcessLog(tmp_path / "worker-1.log", "restart 1")
    assert "worker-1.log cannot be written: No space left" in capsys.readouterr().err


def test_a_planted_link_is_no_log(tmp_path):
    (tmp_path / "worker-1.log").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        ProcessLog(tmp_path / "worker-1.log", "start")
    assert not (tmp_path / "other").exists()
