"""The launcher with real processes; small programs stand in for ddl.main."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddl.cluster_tasks import ClusterTask, cluster_tasks, free_ports
from ddl.errors import ConfigError
from ddl.pinning import place_tasks

ROOT = Path(__file__).parent.parent

# What the programs begin with. None of them stays for ever, whatever goes wrong. `note` leaves a
# file that is there whole or not at all; `wait_for` waits for one; `running` says that a process is
# there, and so are the handlers it has set.
BEGINNING = """
import json, os, pathlib, signal, subprocess, sys, time
signal.alarm(40)
config = json.loads(os.environ["TF_CONFIG"])
kind, index = config["task"]["type"], config["task"]["index"]
name = f"{kind}-{index}"
def note(file, text=""):
    pathlib.Path(file + ".partial").write_text(str(text))
    os.replace(file + ".partial", file)
def wait_for(*files):
    while not all(os.path.exists(file) for file in files):
        time.sleep(0.01)
def running():
    note(name + ".pid", os.getpid())
def wait_for_ever():
    while True:
        signal.pause()
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a launcher of a program's processes, all in a folder for their notes."""
    started = []

    def start(program, num_workers=2, num_ps=0, *, before="", environment=None, **options):
        command = f"[sys.executable, '-S', '-c', {BEGINNING + program!r}]"
        options = {"log_dir": "logs", **options}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        environment.pop("PYTHONUNBUFFERED", None)
        launcher = (
            "import os, signal, sys\n"
            f"{before}\n"
            "from ddl.cluster import Cluster\n"
            f"sys.exit(Cluster({command}, {num_workers}, {num_ps}, **{options!r}).run())"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", launcher],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for file in tmp_path.glob("*.pid"):  # what a failed test left
        if is_running(file):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for process in started:
        process.communicate()


def finish(launcher):
    output, errors = launcher.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return launcher.returncode, output, errors


def wait_for(condition):
    patience = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < patience, "nothing happened"
        time.sleep(0.01)


def is_running(file: Path) -> bool:
    try:
        state = Path(f"/proc/{int(file.read_text())}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def assert_nothing_is_left(folder: Path, count: int):
    files = sorted(folder.glob("*.pid"))
    assert len(files) == count
    assert [file.name for file in files if is_running(file)] == []


# What every process is told


TELL = "note(f'{name}.json', json.dumps(config))"


def told(folder: Path) -> dict[str, dict]:
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_workers_alone(launch, tmp_path):
    status, _, _ = finish(launch(TELL, 3))
    assert status == 0
    configs = told(tmp_path)
    assert set(configs) == {"worker-0", "worker-1", "worker-2"}
    for index in range(3):
        assert configs[f"worker-{index}"]["task"] == {"type": "worker", "index": index}
    clusters = [config["cluster"] for config in configs.values()]
    assert clusters[0] == clusters[1] == clusters[2]
    assert set(clusters[0]) == {"worker"}
    addresses = clusters[0]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


def test_parameter_servers_come_with_a_chief(launch, tmp_path):
    # Others may be ended as soon as the chief is done.
    others = "('worker-0.json', 'worker-1.json', 'ps-0.json')"
    status, _, _ = finish(launch(TELL + f"\nif kind == 'chief': wait_for(*{others})", 2, 1))
    assert status == 0
    configs = told(tmp_path)
    assert set(configs) == {"chief-0", "worker-0", "worker-1", "ps-0"}
    for name, config in configs.items():
        kind, index = name.split("-")
        assert config["task"] == {"type": kind, "index": int(index)}
        sizes = {kind: len(addresses) for kind, addresses in config["cluster"].items()}
        assert sizes == {"chief": 1, "worker": 2, "ps": 1}


def test_one_worker_is_a_cluster_too(launch, tmp_path):
    status, _, errors = finish(launch(TELL, 1))
    assert (status, errors) == (0, "")
    assert set(told(tmp_path)) == {"worker-0"}
    assert not (tmp_path / "logs").exists()


def test_ports_are_free_and_different():
    ports = free_ports(200)
    assert len(set(ports)) == 200


# What is seen of them


SPEAK = """
print(f"out of {name}")
print(f"err of {name}", file=sys.stderr)
"""


def test_the_first_is_shown_and_the_others_go_to_files(launch, tmp_path):
    status, output, errors = finish(launch(SPEAK, 3))
    assert status == 0
    assert output == "out of worker-0\n"
    assert errors.splitlines()[1:] == ["err of worker-0"]
    assert "all but worker 0 is in logs" in errors.splitlines()[0]
    for index in (1, 2):
        heading, *lines = (tmp_path / f"logs/worker-{index}.log").read_text().splitlines()
        assert f"worker {index}, start" in heading
        assert sorted(lines) == [f"err of worker-{index}", f"out of worker-{index}"]
    assert not (tmp_path / "logs/worker-0.log").exists()


def test_the_chief_is_the_first(launch, tmp_path):
    # The others wait for their end, since it comes with that of the chief.
    program = SPEAK + "note(name)\nwait_for('chief-0', 'worker-0', 'ps-0')"
    status, output, _ = finish(launch(program, 1, 1))
    assert status == 0
    assert output == "out of chief-0\n"
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == {"worker-0.log", "ps-0.log"}


def test_without_a_place_logs_go_to_a_new_folder_that_is_named(launch, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    status, _, errors = finish(launch(SPEAK, log_dir=None, environment=environment))
    assert status == 0
    (folder,) = temporary.iterdir()
    assert errors.splitlines()[0].endswith(str(folder))
    assert "out of worker-1" in (folder / "worker-1.log").read_text()


def test_live_shows_the_others_line_by_line(launch, tmp_path):
    program = """
if index == 1:
    print("first")
    sys.stdout.write("sec")
    wait_for("seen")
    print("ond")
    sys.stdout.write("no end")
"""
    launcher = launch(program, live=True)
    assert launcher.stdout.readline() == "[worker 1] first\n"  # while it still runs
    (tmp_path / "seen").touch()
    status, output, _ = finish(launcher)
    assert (status, output) == (0, "[worker 1] second\n[worker 1] no end\n")


def test_logs_that_cannot_be_written_are_an_error(launch, tmp_path):
    (tmp_path / "logs").write_text("a file")
    status, _, errors = finish(launch(TELL, before=CATCH))
    assert status == 1
    assert errors.splitlines()[-1].startswith("ddl-launch: --log_dir=logs cannot be written")
    assert_nothing_is_left(tmp_path, 0)


# As ddl.launch does, around the cluster.
CATCH = """
import ddl.errors
def tell(kind, error, trace):
    print(f"ddl-launch: {error}", file=sys.stderr)
sys.excepthook = tell
"""


# One dies


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
    assert "worker 1 ended with status 3; the rest is ended. Its last lines in logs/" in errors
    lines = [line for line in errors.splitlines() if line.startswith("  line")]
    assert lines == [f"  line {number}" for number in range(10, 30)]
    assert "worker 0" not in errors.replace("all but worker 0", "")
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
    assert errors.index("worker 0 was killed by SIGSEGV; the rest is ended") > place
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
    assert "worker 1 ended with status 77; the rest is ended" in errors
    assert_nothing_is_left(tmp_path, 2)


def test_one_that_is_killed_from_outside(launch, tmp_path):
    launcher = launch("running()\nwait_for_ever()", num_workers=1, num_ps=1)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 3)
    os.kill(int((tmp_path / "ps-0.pid").read_text()), signal.SIGKILL)
    status, _, errors = finish(launcher)
    assert status == 128 + signal.SIGKILL
    assert "ps 0 was killed by SIGKILL; the rest is ended. It wrote nothing." in errors
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
    assert "worker 0 did not end within 0.5 s of SIGTERM, and was killed" in errors
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


GRANDCHILD = """
def start_another():
    ignore = "import os, pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    ignore += "signal.alarm(40); "
    tell = f"pathlib.Path('{name}-child.partial').write_text(str(os.getpid())); "
    end = f"os.replace('{name}-child.partial', '{name}-child.pid'); signal.pause()"
    subprocess.Popen([sys.executable, "-S", "-c", ignore + tell + end])
    wait_for(name + "-child.pid")
"""


def test_what_they_have_started_is_killed_too(launch, tmp_path):
    """Of the one that dies, of the one that is ended, and of the one that is killed."""
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


# Parameter servers


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
    assert "restart 1 of 1: worker 1 alone" in errors
    assert "worker 1 was killed by SIGKILL; it is started again, and the rest goes on" in errors
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
    assert errors.count("restart 1 of 1") == 1


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


# Statuses and restarts


# Each worker ends with the next of its statuses once all are there; a negative one is a signal, and
# with None it waits.
IN_TURN = """
statuses = json.loads(os.environ["STATUSES"])[index]
turn = len(list(pathlib.Path().glob(f"{name}.turn.*")))
note(f"{name}.turn.{turn}", json.dumps(config["cluster"]["worker"]))
wait_for(*(f"worker-{other}.turn.{turn}" for other in range(len(config["cluster"]["worker"]))))
status = statuses[min(turn, len(statuses) - 1)]
if status is None:
    wait_for_ever()
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def in_turn(launch, *statuses, **options):
    environment = {"STATUSES": json.dumps(statuses)}
    return finish(launch(IN_TURN, len(statuses), environment=environment, **options))


def turns(folder: Path) -> int:
    return len(list(folder.glob("worker-0.turn.*")))


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM, 3, 75, 77])
def test_a_restart_and_all_is_well(launch, tmp_path, status):
    ended, _, errors = in_turn(launch, [None, 0], [status, 0], max_restarts=3)
    assert ended == 0
    assert "ddl-launch: restart 1 of 3\n" in errors
    assert "restart 2" not in errors
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
    assert "restart 1 of 2\n" in errors
    assert "restart 2 of 2\n" in errors
    assert "no restart: there were 2" in errors
    assert errors.count("worker 1 ended with status 3") == 3


def test_none_without_being_asked_for(launch, tmp_path):
    status, _, errors = in_turn(launch, [None], [3])
    assert status == 3
    assert turns(tmp_path) == 1
    assert "restart" not in errors


@pytest.mark.parametrize(("status", "why"), [(1, "an error in flags"), (76, "diverged")])
def test_no_restart_where_it_makes_no_sense(launch, tmp_path, status, why):
    ended, _, errors = in_turn(launch, [None], [status], max_restarts=2)
    assert ended == status
    assert turns(tmp_path) == 1
    assert "no restart: " in errors
    assert why in errors


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
    before, after = errors.split("restart 1 of 1")
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


# Signals


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
    assert "restart" not in errors
    assert "ended" not in errors
    assert_nothing_is_left(tmp_path, 2)


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
    assert "worker 0 was still running at the second signal, and was killed" in errors
    assert_nothing_is_left(tmp_path, 4)


def test_no_restart_after_a_signal_whatever_the_status(launch, tmp_path):
    launcher = launch("running()\nwait_for_ever()", max_restarts=3)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    status, _, errors = finish(launcher)
    assert status == 128 + signal.SIGTERM
    assert "restart" not in errors


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
    assert "worker 1 ended with status 3; the rest is ended" in errors
    assert "worker 0 did not end" in errors
    assert "restart" not in errors
    assert_nothing_is_left(tmp_path, 2)


def test_a_signal_between_two_starts_is_heard(launch, tmp_path):
    before = """
from ddl import cluster
class Attempt(cluster.ClusterAttempt):
    def __exit__(self, *arguments):
        super().__exit__(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
cluster.ClusterAttempt = Attempt
"""
    status, _, errors = in_turn(launch, [None, 0], [3, 0], max_restarts=3, before=before)
    assert status == 3
    assert turns(tmp_path) == 1
    assert "restart" not in errors


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
from ddl import cluster
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


# Pinning


def test_pinned_to_cores(launch, tmp_path):
    cores = os.sched_getaffinity(0)
    workers = min(2, len(cores))
    program = """
cores = sorted(os.sched_getaffinity(0))
note(f"{name}.json", json.dumps([cores, os.environ.get("TF_NUM_INTRAOP_THREADS")]))
"""
    status, _, _ = finish(launch(program, workers, pin="cores"))
    assert status == 0
    told = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(workers)]
    share = len(cores) // workers
    for own, threads in told:
        assert len(own) == share
        assert set(own) <= cores
        assert threads == str(share)
    assert len({core for own, _ in told for core in own}) == share * workers


def test_cores_are_shared_alike_and_only_those_at_hand(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {901, 903, 905, 907, 909})
    chief, *workers, server = place_tasks(cluster_tasks(2, 1), "cores")
    assert [place.cores for place in workers] == [{901, 903}, {905, 907}]
    assert [dict(place.environment) for place in workers] == [{"TF_NUM_INTRAOP_THREADS": "2"}] * 2
    assert chief == server
    assert chief.cores is None
    with pytest.raises(ConfigError, match="--num_workers=6 needs as many cores.*use 5"):
        place_tasks(cluster_tasks(6), "cores")


def test_threads_of_one_core_stay_together(monkeypatch, tmp_path):
    """Cores 0 and 2 are two threads of one core here, and so are 1 and 3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr("ddl.pinning._ALL_CORES", tmp_path)
    for core in range(4):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core % 2}\n")
    places = place_tasks(cluster_tasks(2), "cores")
    assert [place.cores for place in places] == [{0, 2}, {1, 3}]


def visible(places) -> list[str]:
    return [place.environment["CUDA_VISIBLE_DEVICES"] for place in places]


def test_pinned_to_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("ddl.pinning._DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible(place_tasks(cluster_tasks(2), "gpus")) == ["0", "1"]
    assert visible(place_tasks(cluster_tasks(2, 1), "gpus")) == ["", "0", "1", ""]
    with pytest.raises(ConfigError, match="--num_workers=3 needs as many GPUs, and there are 2"):
        place_tasks(cluster_tasks(3), "gpus")


@pytest.mark.parametrize(
    ("text", "named"), [("4,7", ["4", "7"]), ("GPU-a, GPU-b,-1,3", ["GPU-a", "GPU-b"]), ("", [])]
)
def test_gpus_that_are_named(monkeypatch, text, named):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert visible(place_tasks(cluster_tasks(len(named)), "gpus")) == named
    with pytest.raises(ConfigError, match=f"there are {len(named)}"):
        place_tasks(cluster_tasks(len(named) + 1), "gpus")


def test_not_pinned(launch, tmp_path):
    program = "note(f'{name}.json', json.dumps(sorted(os.sched_getaffinity(0))))"
    finish(launch(program))
    assert set(json.loads((tmp_path / "worker-1.json").read_text())) == os.sched_getaffinity(0)


# The command line


# An import of TensorFlow fails, and what would be started is printed.
COMMAND = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
from ddl import launch
class Shown:
    def __init__(self, command, *arguments, **options):
        print(command[1:], arguments, options)
    def run(self):
        return 77
if len(sys.argv) > 1 and sys.argv[1] == "show":
    del sys.argv[1]
    launch.Cluster = Shown
launch.run(["ddl-launch", *sys.argv[1:]])
"""


def ddl_launch(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )


GIN = "--gin_file=a.gin"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "flags of ddl.main are missing"),
        (["--num_workers=2", GIN], "flags of ddl.main are missing"),
        (["--num_workers=2", "--"], "flags of ddl.main are missing"),
        (["--", GIN], "--num_workers is missing"),
        (["--num_ps=1", "--", GIN], "--num_workers is missing, which --num_ps=1 needs"),
        (["--num_workers=0", "--", GIN], "--num_workers=0"),
        (["--num_workers=two", "--", GIN], "--num_workers=two"),
        (["--num_workers=2", "--num_ps=-1", "--", GIN], "--num_ps=-1"),
        (["--num_workers=2", "--max_restarts=-1", "--", GIN], "--max_restarts=-1"),
        (["--num_workers=2", "--grace_seconds=-1", "--", GIN], "--grace_seconds=-1"),
        (["--num_worker=2", "--", GIN], "'num_worker'. Did you mean: num_workers"),
        (["2", "--", GIN], "'2' is not a flag"),
        (["--num_workers=2", "--", "a.gin"], "'a.gin' is not a flag"),
        (["--num_workers=2", "--", GIN, "a.gin"], "'a.gin' is not a flag"),
        (["--num_workers=2", "--", "--gin_fil=a.gin"], "'gin_fil'. Did you mean: gin_file"),
        (["--num_workers=2", "--", GIN, "--strategy=miror"], "--strategy=miror"),
        (["--num_workers=2", "--pin=core", "--", GIN], "--pin=core"),
        (["--num_workers=9999", "--pin=cores", "--", GIN], "needs as many cores"),
        (["--num_workers=2", "--pin=gpus", "--", GIN], "needs as many GPUs, and there are 0"),
    ],
    ids=str,
)
def test_bad_input_is_two_lines_and_status_1(arguments, message, tmp_path):
    result = ddl_launch(*arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--num_workers=2", "--help"], ["-h"]], ids=str)
def test_help_says_flags_and_statuses(arguments):
    result = ddl_launch(*arguments)
    assert result.returncode == 0
    for flag in ("num_workers", "num_ps", "max_restarts", "grace_seconds", "pin", "log_dir"):
        assert f"--{flag}" in result.stdout
    assert "--[no]live" in result.stdout
    for status in ("0 done", "128 + N", "76 training diverged", "77", "75 stopped"):
        assert status in result.stdout


def shown(*arguments):
    result = ddl_launch("show", *arguments)
    assert result.returncode == 77, result.stderr  # what the cluster returned
    assert result.stderr == ""
    return result.stdout


def test_the_strategy_is_chosen_unless_it_is_given():
    assert shown("--num_workers=2", "--", GIN) == (
        "['-m', 'ddl.main', '--gin_file=a.gin', '--strategy=multi_worker_mirrored'] (2, 0) "
        "{'max_restarts': 0, 'grace_seconds': 5.0, 'pin': 'none', 'log_dir': None, 'live': False}\n"
    )
    with_servers = shown("--num_workers=2", "--num_ps=3", "--", GIN)
    assert "'--gin_file=a.gin', '--strategy=parameter_server'] (2, 3)" in with_servers
    assert "--strategy" not in shown("--num_workers=1", "--", GIN)  # one process: its devices'
    for given in (["--strategy=mirrored"], ["-strategy", "mirrored"]):
        assert shown("--num_workers=2", "--", GIN, *given).startswith(
            str(["-m", "ddl.main", GIN, *given])
        )


def test_flags_of_ddl_main_are_passed_on_as_they_are():
    given = [GIN, "--gin.TRAIN_STEPS=3", "--gin_param=train/A.b = 'x y'", "--nodry_run"]
    assert str(given)[1:-1] in shown("--num_workers=2", "--", *given)


def test_flags_reach_the_cluster():
    own = ["--max_restarts=3", "--grace_seconds=0.5", "--pin=cores", "--log_dir=x/y", "--live"]
    assert (
        "{'max_restarts': 3, 'grace_seconds': 0.5, 'pin': 'cores', 'log_dir': 'x/y', 'live': True}"
        in shown("--num_workers=1", *own, "--", GIN)
    )


@pytest.mark.parametrize(
    ("given", "log_dir"),
    [
        (["--model_dir=runs/a"], "PosixPath('runs/a/logs')"),
        (["--model_dir", "runs/a"], "PosixPath('runs/a/logs')"),
        (["--model_dir=runs/a", "--dry_run"], "None"),  # which writes nothing there
        (["--model_dir=gs://runs/a"], "None"),
    ],
    ids=str,
)
def test_logs_lie_in_the_model_dir(given, log_dir):
    assert f"'log_dir': {log_dir}" in shown("--num_workers=2", "--", GIN, *given)


def test_names_of_tasks():
    assert [str(task) for task in cluster_tasks(1, 1)] == ["chief", "worker 0", "ps 0"]
    assert cluster_tasks(1) == [ClusterTask("worker", 0)]


def test_it_starts_ddl_main(tmp_path):
    """Which tells that a config is missing before it imports TensorFlow."""
    command = [sys.executable, "-m", "ddl.launch", "--num_workers=2", "--max_restarts=2", "--"]
    result = subprocess.run(
        [*command, "--gin_file=absent.gin", "--model_dir=run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 1
    assert "ended with status 1" in result.stderr
    assert "no config file absent.gin" in result.stderr
    assert "no restart: status 1" in result.stderr
    assert "worker 1, start" in (tmp_path / "run/logs/worker-1.log").read_text()
