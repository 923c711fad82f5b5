"""What is seen of the processes of a cluster."""

import resource

import pytest

from ddl.launcher.log import ProcessLog
from tests.launcher.programs import assert_nothing_is_left, finish

SPEAK = """
print(f"out of {name}")
print(f"err of {name}", file=sys.stderr)
"""


def test_the_first_is_shown_and_the_others_go_to_files(launch, tmp_path):
    status, output, errors = finish(launch(SPEAK, 3))
    assert status == 0
    assert output == "out of worker-0\n"
    assert errors.splitlines()[1:] == ["err of worker-0"]
    assert "all processes except worker 0 is in logs." in errors.splitlines()[0]
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
    assert errors.splitlines()[0].endswith(f"{folder}.")
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


# As ddl.launch does, around the cluster.
CATCH = """
import ddl.errors
def tell(kind, error, trace):
    print(f"ddl-launch: {error}", file=sys.stderr)
sys.excepthook = tell
"""


def test_logs_that_cannot_be_written_are_an_error(launch, tmp_path):
    (tmp_path / "logs").write_text("a file")
    status, _, errors = finish(launch(SPEAK, before=CATCH))
    assert status == 1
    assert errors.splitlines()[-1].startswith("ddl-launch: --log_dir=logs cannot be written")
    assert_nothing_is_left(tmp_path, 0)


def test_a_full_disk_does_not_end_a_restart(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        log = ProcessLog(tmp_path / "worker-1.log", "restart 1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "worker-1.log cannot be written: File too large" in capsys.readouterr().err
    assert log.last_lines(3) == []
    log.close()


def test_a_planted_link_is_no_log(tmp_path):
    (tmp_path / "worker-1.log").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        ProcessLog(tmp_path / "worker-1.log", "start")
    assert not (tmp_path / "other").exists()
