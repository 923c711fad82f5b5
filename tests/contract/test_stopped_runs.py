"""Runs that are stopped or fail at some point, and the same command again."""

import os
import resource
import shutil
import signal
import time

import pytest

from tests.contract import acts, commands


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing stops."""
    return commands.finished(tmp_path_factory.mktemp("straight") / "run", *acts.EVERY_STEP)


def act_at(step, function, model_dir) -> commands.Ended:
    """Starts the run; once, after `step`, it calls the function."""
    acts.AT[step] = function
    try:
        return commands.small(model_dir, *acts.EVERY_STEP)
    finally:
        full_disk(False)
        acts.AT.clear()


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 5)])
def test_a_signal_saves_and_the_run_resumes(tmp_path, straight, number, step):
    run = tmp_path / "run"

    def stop():
        os.kill(os.getpid(), number)
        time.sleep(1)  # a thread hears of the signal, on a busy machine later than at the next step

    acts.AT.update(dict.fromkeys(range(step + 1, 11), lambda: time.sleep(5)))  # or at one of these
    ended = act_at(step, stop, run)
    stopped = commands.saved_steps(run)[-1]
    assert step <= stopped < 12
    commands.assert_error(ended, signal.Signals(number).name, f"step {stopped}", status=75)
    assert f"step {stopped}" in commands.small(run, *acts.EVERY_STEP).out
    commands.assert_same_end(run, straight)


class Killed(BaseException):
    """Nothing handles it, as nothing handles SIGKILL."""


def fail(error):
    raise error


def test_a_run_may_be_killed_again_and_again(tmp_path, straight):
    """Also before its first save, and at its last step."""
    for step in (1, 5, 12):
        with pytest.raises(Killed):
            act_at(step, lambda: fail(Killed()), tmp_path / "run")
    commands.finished(tmp_path / "run", *acts.EVERY_STEP)
    commands.assert_same_end(tmp_path / "run", straight)


ENDS = [
    (KeyError("absent"), 1, ["KeyError: 'absent'", "test_stopped_runs.py:"]),
    (ConnectionResetError("peer"), 70, ["ConnectionResetError: peer"]),
    (SystemExit(), 70, ["sys.exit() was called before the command was done"]),
    (SystemExit(3), 3, []),
]


@pytest.mark.parametrize(("error", "status", "words"), ENDS, ids=repr)
def test_errors_of_the_users_code_are_1_those_of_the_system_70(tmp_path, error, status, words):
    """And an exit in the user's code is not done."""
    ended = act_at(1, lambda: fail(error), tmp_path / "run")
    assert ended.status == status
    assert all(word in ended.err for word in words), ended.err
    assert ("Traceback" in ended.err) == (status == 70)


def full_disk(is_full):
    """Makes every write to a file fail, also those of TensorFlow; or no longer."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))


@pytest.mark.parametrize("recovers", [True, False])
def test_a_full_disk(tmp_path, straight, recovers):
    """Writes that it refused are repeated. One that stays full is an error; the run resumes."""
    run = tmp_path / "run"
    if recovers:
        acts.AT[10] = lambda: full_disk(False)
    ended = act_at(3, lambda: full_disk(True), run)
    if recovers:
        assert ended.status == 0, ended.err
        assert "cannot be written" in ended.out
    else:
        commands.assert_error(ended, "written")
        assert 12 not in commands.saved_steps(run)
        commands.finished(run, *acts.EVERY_STEP)
    assert commands.saved_steps(run)[-1] == 12
    commands.assert_same_end(run, straight)


def test_without_a_good_checkpoint_nothing_is_trained_anew(tmp_path, straight):
    """tests/checkpoints/ damages some, and each of the files."""
    run = shutil.copytree(straight, tmp_path / "run")
    for path in (run / "checkpoints").glob("*.index"):
        path.write_bytes(path.read_bytes()[:-20])
    commands.assert_error(commands.small(run, *acts.EVERY_STEP), "checkpoint")
    assert len(commands.lines(run)) == len(commands.lines(straight))


def test_a_second_run_in_the_directory_is_refused(tmp_path, straight):
    """Its lock is that of an open file: a process is refused its own as that of another."""
    run, second = tmp_path / "run", []
    ended = act_at(5, lambda: second.append(commands.small(run, *acts.EVERY_STEP)), run)
    commands.assert_error(second[0], str(run), "another process", status=70)
    assert ended.status == 0, ended.err
    commands.assert_same_end(run, straight)


def test_divergence_is_status_76_and_saves_nothing_that_is_not_finite(tmp_path):
    run = tmp_path / "run"
    commands.assert_error(commands.small(run, "LEARNING_RATE = 1e30"), "diverged", status=76)
    assert commands.saved_steps(run) == []


@pytest.mark.parametrize("flags", [(), ("--mode=eval",)])
def test_an_interrupt_before_training_is_status_130(tmp_path, monkeypatch, flags):
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    ended = commands.small(tmp_path / "run", "import interrupted", flags=flags)
    commands.assert_error(ended, status=130)
    assert not (tmp_path / "run").exists()
