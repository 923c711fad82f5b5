"""What becomes of a cluster in which a process dies, or will not end."""

import os
import signal

from tests.launcher.programs import GRANDCHILD, assert_nothing_is_left, finish, is_running, wait_for


def test_when_one_dies_the_rest_is_ended_and_the_dead_is_named(launch, tmp_path):
    program = """
running()
if index == 1:
    for number in range(30):
        print(f"line {number}")
    wait_for("worker-0.pid", "worker-2.pid")
    sys.exit(3)
wait_for_ever()
"""
    status, _, errors = finish(launch(program, 3))
    assert status == 3
    assert (
        "worker 1 ended with status 3. The launcher stops the other processes. "
        "The last lines in logs/"
    ) in errors
    lines = [line for line in errors.splitlines() if line.startswith("  line")]
    assert lines == [f"  line {number}" for number in range(10, 30)]
    assert "worker 0" not in errors.replace("all processes except worker 0", "")
    assert_nothing_is_left(tmp_path, 3)


def test_when_the_first_dies_it_is_named_and_its_output_has_been_seen(launch, tmp_path):
    program = """
running()
if index == 0:
    print("the end", file=sys.stderr)
    wait_for("worker-1.pid")
    os.kill(os.getpid(), signal.SIGSEGV)
wait_for_ever()
"""
    status, _, errors = finish(launch(program))
    assert status == 128 + signal.SIGSEGV
    place = errors.index("the end")
    assert errors.index("worker 0 was killed by SIGSEGV. The launcher stops") > place
    assert_nothing_is_left(tmp_path, 2)


def test_the_one_that_was_lost_is_named_though_its_end_is_seen_later(launch, tmp_path):
    program = """
running()
wait_for("worker-0.pid", "worker-1.pid", "worker-2.pid")
if index == 0:
    wait_for("lost-1", "lost-2")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
note(f"lost-{index}")
sys.exit(77)
"""
    status, _, errors = finish(launch(program, 3))
    assert status == 128 + signal.SIGKILL
    assert errors.index("worker 0 was killed by SIGKILL") < errors.index("worker 1 ended with")
    assert_nothing_is_left(tmp_path, 3)


def test_one_that_lost_another_which_never_ends_is_answered_soon(launch, tmp_path):
    program = """
running()
if index == 0:
    wait_for_ever()
wait_for("worker-0.pid")
sys.exit(77)
"""
    status, _, errors = finish(launch(program))
    assert status == 77
    assert "worker 1 ended with status 77. The launcher stops the other processes." in errors
    assert_nothing_is_left(tmp_path, 2)


def test_one_that_is_killed_from_outside(launch, tmp_path):
    launcher = launch("running()\nwait_for_ever()", num_workers=1, num_ps=1)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 3)
    os.kill(int((tmp_path / "ps-0.pid").read_text()), signal.SIGKILL)
    status, _, errors = finish(launcher)
    assert status == 128 + signal.SIGKILL
    assert (
        "ps 0 was killed by SIGKILL. The launcher stops the other processes. "
        "logs/ps-0.log has no output of this process."
    ) in errors
    assert_nothing_is_left(tmp_path, 3)


def test_one_that_ignores_sigterm_is_killed(launch, tmp_path):
    program = """
if index == 1:
    running()
    wait_for("worker-0.pid")
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *arguments: note("heard"))
running()
wait_for_ever()
"""
    status, _, errors = finish(launch(program, grace_seconds=0.5))
    assert status == 3
    assert (tmp_path / "heard").exists()
    assert "The launcher killed worker 0: it did not end within 0.5 s of SIGTERM." in errors
    assert_nothing_is_left(tmp_path, 2)


def test_one_that_is_stopped_is_killed(launch, tmp_path):
    program = """
running()
if index == 1:
    wait_for("go")
    sys.exit(3)
wait_for_ever()
"""
    launcher = launch(program, grace_seconds=0.2)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    os.kill(int((tmp_path / "worker-0.pid").read_text()), signal.SIGSTOP)
    (tmp_path / "go").touch()
    status, _, _ = finish(launcher)
    assert status == 3
    assert_nothing_is_left(tmp_path, 2)


def test_time_to_end_is_given(launch, tmp_path):
    program = """
def end(*arguments):
    time.sleep(0.3)
    note("saved")
    sys.exit(0)
if index == 0:
    signal.signal(signal.SIGTERM, end)
running()
wait_for("worker-0.pid")
if index == 1:
    sys.exit(3)
wait_for_ever()
"""
    status, _, errors = finish(launch(program, grace_seconds=30))
    assert status == 3
    assert (tmp_path / "saved").exists()
    assert "did not end" not in errors


def test_what_they_have_started_is_killed_too(launch, tmp_path):
    """This holds for one that dies, one that the launcher stops, and one that it kills."""
    program = (
        GRANDCHILD
        + """
if index == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
start_another()
running()
wait_for("worker-0.pid", "worker-1.pid", "worker-2.pid")
if index == 2:
    sys.exit(3)
wait_for_ever()
"""
    )
    status, _, _ = finish(launch(program, 3, grace_seconds=0.5))
    assert status == 3
    assert_nothing_is_left(tmp_path, 6)


def test_what_they_have_started_does_not_outlive_a_good_end(launch, tmp_path):
    status, _, _ = finish(launch(GRANDCHILD + "start_another()"))
    assert status == 0
    assert_nothing_is_left(tmp_path, 2)


def test_those_that_are_done_wait_for_the_others(launch, tmp_path):
    program = """
running()
if index == 0:
    sys.exit(0)
wait_for("go")
note("done")
"""
    launcher = launch(program)
    wait_for(lambda: (tmp_path / "worker-0.pid").exists())
    wait_for(lambda: not is_running(tmp_path / "worker-0.pid"))
    (tmp_path / "go").touch()
    status, _, _ = finish(launcher)
    assert status == 0
    assert (tmp_path / "done").exists()


def test_a_chief_that_is_done_needs_the_others_no_more(launch, tmp_path):
    program = """
running()
if kind == "chief":
    wait_for("ps-0.pid", "worker-0.pid")
    sys.exit(0)
wait_for_ever()
"""
    status, _, errors = finish(launch(program, 1, 1))
    assert status == 0
    assert len(errors.splitlines()) == 1
    assert_nothing_is_left(tmp_path, 3)
