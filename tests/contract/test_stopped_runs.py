"""Runs that are stopped or fail at some point, and the same command again."""

import os
import re
import resource
import shutil
import signal
import sys
import time

import pytest

from tests.contract import acts
from tests.contract.commands import (
    Ended,
    arguments,
    assert_same_end,
    finished,
    lines,
    saved_steps,
    small,
)
from tests.processes import forked


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing stops."""
    return finished(tmp_path_factory.mktemp("straight") / "run", *acts.EVERY_STEP)


def act_at(step, function, model_dir) -> Ended:
    """Starts the run; once, after `step`, it calls the function."""
    acts.AT[step] = function
    try:
        return small(model_dir, *acts.EVERY_STEP)
    finally:
        acts.AT.clear()


def process(model_dir, **variables):
    command = [sys.executable, "-m", "ddl.main", *arguments(model_dir, *acts.EVERY_STEP)]
    environment = {**os.environ, **variables}
    return forked.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 5)])
def test_a_signal_saves_and_the_run_resumes(tmp_path, straight, number, step):
    run = tmp_path / "run"

    def stop():
        os.kill(os.getpid(), number)
        time.sleep(1)  # a thread hears of the signal, on a busy machine later than at the next step

    ended = act_at(step, stop, run)
    assert ended.status == 75
    assert "Traceback" not in ended.err
    stopped = saved_steps(run)[-1]
    assert step <= stopped < 12
    for words in (signal.Signals(number).name, f"step {stopped}"):
        assert words in ended.err
    assert f"step {stopped}" in small(run, *acts.EVERY_STEP).out
    assert_same_end(run, straight)


@pytest.mark.processes
def test_a_killed_run_resumes(tmp_path, straight):
    run = tmp_path / "run"
    killed = process(run, **{acts.KILLED_AT: "7", acts.MODEL_DIR: str(run)})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved_steps(run) == [4]
    assert "step 4" in small(run, *acts.EVERY_STEP).out
    assert_same_end(run, straight)


class Killed(BaseException):
    """Nothing handles it, as nothing handles SIGKILL."""


def kill():
    raise Killed


def test_a_run_killed_before_its_first_save_begins_again(tmp_path, straight):
    with pytest.raises(Killed):
        act_at(1, kill, tmp_path / "run")
    finished(tmp_path / "run", *acts.EVERY_STEP)
    assert_same_end(tmp_path / "run", straight)


def test_a_run_may_be_killed_again_and_again(tmp_path, straight):
    for step in (5, 5, 12):
        with pytest.raises(Killed):
            act_at(step, kill, tmp_path / "run")
    finished(tmp_path / "run", *acts.EVERY_STEP)
    assert_same_end(tmp_path / "run", straight)


def fail(error):
    raise error


def test_an_error_of_the_users_code_is_status_1_with_its_line(tmp_path):
    ended = act_at(6, lambda: fail(KeyError("absent")), tmp_path / "run")
    assert ended.status == 1
    assert "KeyError: 'absent'" in ended.err
    assert "test_stopped_runs.py:" in ended.err
    assert "Traceback" not in ended.err


def test_a_failure_of_the_system_is_status_70_with_its_traceback(tmp_path):
    ended = act_at(6, lambda: fail(ConnectionResetError("peer")), tmp_path / "run")
    assert ended.status == 70
    assert "Traceback" in ended.err
    assert "ConnectionResetError: peer" in ended.err


@pytest.mark.parametrize(("asked", "status"), [(None, 70), (0, 70), (3, 3)])
def test_an_exit_in_the_users_code_is_not_done(tmp_path, asked, status):
    ended = act_at(6, lambda: sys.exit(asked), tmp_path / "run")
    assert ended.status == status
    assert ("sys.exit() was called before the command was done" in ended.err) == (status == 70)


def full_disk(is_full):
    """Makes every write to a file fail, also those of TensorFlow; or no longer."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))


def test_writes_that_a_full_disk_refused_are_repeated(tmp_path, straight):
    """The run trains on and ends as if there had been room."""
    acts.AT[10] = lambda: full_disk(False)
    try:
        ended = act_at(3, lambda: full_disk(True), tmp_path / "run")
    finally:
        full_disk(False)
    assert "cannot be written" in ended.out
    assert ended.status == 0, ended.err
    assert saved_steps(tmp_path / "run")[-1] == 12
    assert_same_end(tmp_path / "run", straight)


def test_a_disk_that_stays_full_is_an_error(tmp_path, straight):
    try:
        ended = act_at(6, lambda: full_disk(True), tmp_path / "run")
    finally:
        full_disk(False)
    assert ended.status == 1
    assert "written" in ended.err
    assert "Traceback" not in ended.err
    assert 12 not in saved_steps(tmp_path / "run")
    finished(tmp_path / "run", *acts.EVERY_STEP)
    assert_same_end(tmp_path / "run", straight)


def damage(run, step, ending):
    (path,) = (run / "checkpoints").glob(f"*[!0-9]{step}.{ending}*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["data", "index"])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path, straight, ending):
    run = shutil.copytree(straight, tmp_path / "run")
    damage(run, 12, ending)
    ended = small(run, *acts.EVERY_STEP)
    assert ended.status == 0, ended.err
    assert re.search(r"step.12\b.* damaged", ended.out + ended.err)
    assert "step 8" in ended.out
    assert_same_end(run, straight)


def test_without_a_good_checkpoint_nothing_is_trained_anew(tmp_path, straight):
    run = shutil.copytree(straight, tmp_path / "run")
    for step in saved_steps(run):
        damage(run, step, "index")
    ended = small(run, *acts.EVERY_STEP)
    assert ended.status == 1
    assert "checkpoint" in ended.err
    assert len(lines(run)) == len(lines(straight))


@pytest.mark.processes
def test_a_second_run_in_the_directory_is_refused(tmp_path, straight):
    run, second = tmp_path / "run", []
    ended = act_at(5, lambda: second.append(process(run)), run)
    assert second[0].returncode == 70
    assert str(run) in second[0].stderr
    assert "Traceback" not in second[0].stderr
    assert ended.status == 0
    assert_same_end(run, straight)


def test_divergence_is_status_76_and_saves_nothing_that_is_not_finite(tmp_path):
    run = tmp_path / "run"
    ended = small(run, "LEARNING_RATE = 1e30")
    assert ended.status == 76
    assert "diverged" in ended.err
    assert "Traceback" not in ended.err
    assert saved_steps(run) == []


@pytest.mark.parametrize("flags", [(), ("--mode=eval",)])
def test_an_interrupt_before_training_is_status_130(tmp_path, monkeypatch, flags):
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    ended = small(tmp_path / "run", "import interrupted", flags=flags)
    assert ended.status == 130
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()
