"""Signals to the launcher, and its own end."""

import re
import signal
import time

import pytest

from tests.launcher.programs import (
    GRANDCHILD,
    assert_nothing_is_left,
    finish,
    in_turn,
    is_running,
    turns,
    wait_for,
)

STOPPABLE = """
def stop(number, frame):
    note(f"{name}.{number}")
    if number == signal.SIGTERM:
        wait_for("worker-0.15", "worker-1.15")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
running()
wait_for_ever()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_all_and_nothing_restarts(launch, tmp_path, number):
    launcher = launch(STOPPABLE, max_restarts=3)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.send_signal(number)
    status, _, errors = finish(launcher)
    assert status == 75
    assert len(list(tmp_path.glob(f"*.{int(number)}"))) == 2
    assert "restart" not in errors.lower()
    assert "ended" not in errors
    assert_nothing_is_left(tmp_path, 2)


def test_requests_for_stacks_are_passed_on_and_end_nothing(launch, tmp_path):
    program = """
asked = 0
def answer(number, frame):
    global asked
    asked += 1
    note(f"{name}.asked-{asked}")
    if asked == 2:
        sys.exit(0)
signal.signal(signal.SIGQUIT, answer)
running()
wait_for_ever()
"""
    launcher = launch(program)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    for times in (1, 2):
        launcher.send_signal(signal.SIGQUIT)
        wait_for(lambda times=times: len(list(tmp_path.glob(f"*.asked-{times}"))) == 2)
    assert finish(launcher)[0] == 0


def test_who_still_saves_is_not_disturbed_by_who_is_done(launch, tmp_path):
    """A second SIGTERM would end ddl.main at once."""
    program = """
heard = 0
def stop(number, frame):
    global heard
    heard += 1
    if heard > 1:
        note("disturbed")
signal.signal(signal.SIGTERM, stop)
running()
while not heard:
    time.sleep(0.01)
if index == 0:
    note("saving")
    wait_for("go")
sys.exit(75)
"""
    launcher = launch(program, grace_seconds=0.1)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "saving").exists)
    wait_for(lambda: not is_running(tmp_path / "worker-1.pid"))
    time.sleep(0.5)  # in which nothing may happen
    (tmp_path / "go").touch()
    status, _, _ = finish(launcher)
    assert status == 75
    assert not (tmp_path / "disturbed").exists()


def test_a_second_signal_kills_all(launch, tmp_path):
    program = (
        GRANDCHILD
        + """
def stop(number, frame):
    if index == 0:
        note("heard")
    else:
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
start_another()
running()
wait_for_ever()
"""
    )
    launcher = launch(program)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 4)
    launcher.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "heard").exists)
    wait_for(lambda: not is_running(tmp_path / "worker-1.pid"))
    launcher.send_signal(signal.SIGINT)
    status, _, errors = finish(launcher)
    assert status == 128 + signal.SIGKILL  # and not that of the one that was able to save
    assert "The launcher killed worker 0: it was still running at the second signal." in errors
    assert_nothing_is_left(tmp_path, 4)


def test_no_restart_after_a_signal_whatever_the_status(launch, tmp_path):
    launcher = launch("running()\nwait_for_ever()", max_restarts=3)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    status, _, errors = finish(launcher)
    assert status == 128 + signal.SIGTERM
    assert "restart" not in errors.lower()


def test_one_that_dies_while_all_stop_ends_the_rest(launch, tmp_path):
    program = """
def stop(number, frame):
    if index == 1:
        wait_for("worker-0.stops")
        sys.exit(3)
    note("worker-0.stops")
signal.signal(signal.SIGTERM, stop)
running()
wait_for_ever()
"""
    launcher = launch(program, grace_seconds=0.2, max_restarts=1)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    status, _, errors = finish(launcher)
    assert status == 3
    assert "worker 1 ended with status 3. The launcher stops the other processes." in errors
    assert "killed worker 0: it did not end" in errors
    assert "restart" not in errors.lower()
    assert_nothing_is_left(tmp_path, 2)


def test_a_signal_between_two_starts_is_heard(launch, tmp_path):
    before = """
from ddl.launcher import cluster
class Attempt(cluster.ClusterAttempt):
    def __exit__(self, *arguments):
        super().__exit__(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
cluster.ClusterAttempt = Attempt
"""
    status, _, errors = in_turn(launch, [None, 0], [3, 0], max_restarts=3, before=before)
    assert status == 3
    assert turns(tmp_path) == 1
    assert "restart" not in errors.lower()


def test_a_signal_reaches_each_process_as_if_it_ran_alone(launch, tmp_path):
    """The launcher's blocked and ignored signals are not theirs."""
    program = """
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
note(f"{name}.txt", f"{set(blocked)} {handlers}")
"""
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)"  # as in a script's background
    finish(launch(program, before=before))
    default = [signal.SIG_DFL, signal.default_int_handler]
    for index in range(2):
        assert (tmp_path / f"worker-{index}.txt").read_text() == re.sub(
            "0x[0-9a-f]+", "", f"set() {default}"
        )


def test_a_launcher_that_is_killed_leaves_nothing_behind(launch, tmp_path):
    program = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
running()
wait_for_ever()
"""
    launcher = launch(program, 3)
    files = [tmp_path / f"worker-{index}.pid" for index in range(3)]
    wait_for(lambda: all(file.exists() for file in files))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(is_running(file) for file in files))


def test_a_process_that_cannot_be_started_takes_the_others_with_it(launch, tmp_path):
    before = """
import time
from ddl.launcher import cluster
start = cluster.ClusterProcess
def start_one(task, *arguments):
    if task.index == 1:
        while not os.path.exists("worker-0.pid"):
            time.sleep(0.01)
        sys.exit("no more processes")
    return start(task, *arguments)
cluster.ClusterProcess = start_one
"""
    program = GRANDCHILD + "start_another()\nrunning()\nwait_for_ever()"
    status, _, errors = finish(launch(program, before=before))
    assert status == 1
    assert "no more processes" in errors
    assert_nothing_is_left(tmp_path, 2)
