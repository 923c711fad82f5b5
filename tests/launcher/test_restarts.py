"""When a cluster is started again, and the status it ends with."""

import json
import os
import signal

import pytest

from ddl.launcher.cluster import Cluster
from tests.launcher.programs import finish, in_turn, is_running, turns, wait_for


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM, 3, 75, 77])
def test_a_restart_and_all_is_well(launch, tmp_path, status):
    ended, _, errors = in_turn(launch, [None, 0], [status, 0], max_restarts=3)
    assert ended == 0
    assert "ddl-launch: Restart 1 of 3: all processes.\n" in errors
    assert "restart 2" not in errors.lower()
    first, second = (
        json.loads((tmp_path / f"worker-0.turn.{turn}").read_text()) for turn in range(2)
    )
    assert first != second  # the ports
    headings = [
        line for line in (tmp_path / "logs/worker-1.log").read_text().splitlines() if "---" in line
    ]
    assert len(headings) == 2
    assert "restart 1" in headings[1]


def test_as_many_restarts_as_are_allowed(launch, tmp_path):
    status, _, errors = in_turn(launch, [None], [3], max_restarts=2)
    assert status == 3
    assert turns(tmp_path) == 3
    assert "Restart 1 of 2: all processes.\n" in errors
    assert "Restart 2 of 2: all processes.\n" in errors
    assert "No restart: --max_restarts=2 is reached." in errors
    assert errors.count("worker 1 ended with status 3") == 3


def test_none_without_being_asked_for(launch, tmp_path):
    status, _, errors = in_turn(launch, [None], [3])
    assert status == 3
    assert turns(tmp_path) == 1
    assert "restart" not in errors.lower()


@pytest.mark.parametrize(("status", "why"), [(1, "an error in flags"), (76, "diverged")])
def test_no_restart_where_it_makes_no_sense(launch, tmp_path, status, why):
    ended, _, errors = in_turn(launch, [None], [status], max_restarts=2)
    assert ended == status
    assert turns(tmp_path) == 1
    assert "No restart: " in errors
    assert why in errors


@pytest.mark.parametrize("statuses", [[70, 1], [1, 70], [-9, 1]], ids=str)
def test_no_restart_where_one_of_them_has_an_error_to_correct(statuses, capsys):
    assert not Cluster(["command"], 2, max_restarts=1)._may_restart(statuses)
    assert "No restart: status 1 means an error" in capsys.readouterr().err


def test_last_lines_are_those_of_the_last_start(launch):
    program = """
if index == 1:
    first = not os.path.exists("again")
    note("again")
    print("once" if first else "twice")
    sys.exit(3)
wait_for_ever()
"""
    _, _, errors = finish(launch(program, max_restarts=1))
    before, after = errors.split("Restart 1 of 1")
    assert "once" in before
    assert "twice" in after
    assert "once" not in after


# The launcher is stopped until all have ended, so that it sees their ends at the same time.
TOGETHER = """
signal.signal(signal.SIGUSR1, lambda *arguments: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
running()
signal.sigwait([signal.SIGUSR1])
statuses = json.loads(os.environ["STATUSES"])
if statuses[index] < 0:
    os.kill(os.getpid(), -statuses[index])
sys.exit(statuses[index])
"""


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        ([0, 75], 75),
        ([77, 75], 77),
        ([77, 1, 75], 1),
        ([70, 1], 1),
        ([77, 3, 0], 3),
        ([1, 76, 77], 76),
        ([76, -signal.SIGSEGV, 1], 128 + signal.SIGSEGV),
    ],
    ids=str,
)
def test_the_worst_status_is_that_of_the_whole(launch, tmp_path, statuses, worst):
    environment = {"STATUSES": json.dumps(statuses)}
    launcher = launch(TOGETHER, len(statuses), environment=environment)
    files = [tmp_path / f"worker-{index}.pid" for index in range(len(statuses))]
    wait_for(lambda: all(file.exists() for file in files))
    launcher.send_signal(signal.SIGSTOP)
    for file in files:
        os.kill(int(file.read_text()), signal.SIGUSR1)
    wait_for(lambda: not any(is_running(file) for file in files))
    launcher.send_signal(signal.SIGCONT)
    status, _, _ = finish(launcher)
    assert status == worst


def test_statuses_are_not_lost_where_sigchld_is_ignored(launch):
    before = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    status, _, _ = finish(launch("sys.exit(3)", before=before))
    assert status == 3
