"""When a process of a cluster with parameter servers dies."""

import signal

import pytest

from tests.launcher.programs import assert_nothing_is_left, finish, is_running, wait_for


def test_a_worker_of_parameter_servers_is_started_again_alone(launch, tmp_path):
    program = """
turn = len(list(pathlib.Path().glob(f"{name}.turn.*")))
note(f"{name}.turn.{turn}", os.environ["TF_CONFIG"])
running()
if name == "worker-1":
    print(f"turn {turn}")
    wait_for("chief-0.pid", "worker-0.pid", "ps-0.pid")
    os.kill(os.getpid(), signal.SIGKILL) if turn == 0 else wait_for_ever()
if kind == "chief":
    wait_for("worker-1.turn.1")
    sys.exit(0)
wait_for_ever()
"""
    status, _, errors = finish(launch(program, 2, 1, max_restarts=1))
    assert status == 0
    assert "Restart 1 of 1: worker 1 alone." in errors
    assert "worker 1 was killed by SIGKILL. The launcher restarts it alone." in errors
    assert "  turn 0" in errors
    turns = {path.name: path.read_text() for path in tmp_path.glob("*.turn.*")}
    assert len(turns) == 5
    assert turns["worker-1.turn.0"] == turns["worker-1.turn.1"]  # the same address
    assert_nothing_is_left(tmp_path, 4)


@pytest.mark.parametrize(("dies", "status"), [("worker-1", 1), ("worker-1", 77), ("ps-0", 3)])
def test_what_ends_a_cluster_with_parameter_servers(launch, tmp_path, dies, status):
    """An error in flags, a worker that lost another process, a parameter server."""
    program = f"""
running()
if name == "{dies}":
    wait_for("chief-0.pid", "worker-0.pid", "worker-1.pid", "ps-0.pid")
    sys.exit({status})
wait_for_ever()
"""
    ended, _, errors = finish(launch(program, 2, 1, max_restarts=1, grace_seconds=1))
    assert ended == status
    assert "alone" not in errors
    assert_nothing_is_left(tmp_path, 4)


def test_a_chief_that_lost_another_ends_all_and_no_restart_is_spent_on_a_worker(launch, tmp_path):
    program = """
running()
wait_for("chief-0.pid", "worker-0.pid", "ps-0.pid")
if os.path.exists("again"):
    sys.exit(0)
if kind == "chief":
    note("lost")
    sys.exit(77)
if kind == "worker":
    wait_for("lost")
    time.sleep(0.5)
    note("again")
    os.kill(os.getpid(), signal.SIGABRT)
wait_for_ever()
"""
    launcher = launch(program, num_workers=1, num_ps=1, max_restarts=1)
    status, _, errors = finish(launcher)
    assert status == 0, errors
    assert "alone" not in errors
    assert errors.count("Restart 1 of 1") == 1


def test_a_chief_that_saves_speaks_for_those_that_end_of_the_signal(launch, tmp_path):
    program = """
def save(*arguments):
    wait_for("ended")
    sys.exit(75)
if kind == "chief":
    signal.signal(signal.SIGTERM, save)
running()
wait_for_ever()
"""
    launcher = launch(program, 1, 1)
    names = ("chief-0", "worker-0", "ps-0")
    wait_for(lambda: all((tmp_path / f"{name}.pid").exists() for name in names))
    launcher.send_signal(signal.SIGTERM)
    wait_for(lambda: not is_running(tmp_path / "worker-0.pid"))
    (tmp_path / "ended").touch()
    status, _, _ = finish(launcher)
    assert status == 75
    assert_nothing_is_left(tmp_path, 3)
