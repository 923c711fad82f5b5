"""Real runs that are asked to stop, or find their newest checkpoint damaged."""

import shutil
import time

import numpy as np
import pytest

from tests.run.whole_runs import MODES, StraightRuns, assert_same_end, finish, lines, start, tensors


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return StraightRuns(tmp_path_factory.mktemp("straight"))


def stop(process) -> str:
    """Asks for a stop and waits for it; what the run said."""
    asked = time.monotonic()
    process.terminate()
    status, output = finish(process)
    assert status == 75, output
    assert time.monotonic() - asked < 5
    assert "Training stopped on SIGTERM at step" in output
    assert "after saving. Run the same command to resume." in output
    return output


def step_of(model_dir) -> int:
    return int(tensors(model_dir)["state/step/.ATTRIBUTES/VARIABLE_VALUE"])


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on(tmp_path, straight):
    mode = "float32 mirrored"
    reference, _ = straight(mode)
    model_dir = tmp_path / "run"
    process = start(model_dir, *MODES[mode])
    while not process.stdout.readline().startswith("step 20"):
        assert process.poll() is None
    stop(process)
    assert 20 <= step_of(model_dir) < 240
    status, output = finish(start(model_dir, *MODES[mode]))
    assert status == 0, output
    assert_same_end(model_dir, reference)


@pytest.mark.slow
def test_sigterm_cuts_a_long_loop_short(tmp_path):
    """One loop of 2,000 updates, with nothing to do in between."""
    seldom = [f"{name} = 2000" for name in ("EVAL_EVERY", "CHECKPOINT_EVERY", "LOG_EVERY")]
    arguments = ("float32", ["--steps_per_loop=100000"], "TRAIN_STEPS = 2000", *seldom)
    process = start(tmp_path / "run", *arguments)
    while not (tmp_path / "run" / "operative_config.gin").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(6)  # the first updates wait for TensorFlow to optimize the graph
    stop(process)
    assert 0 < step_of(tmp_path / "run") < 2000
    for name in ("run", "straight"):
        status, output = finish(start(tmp_path / name, *arguments))
        assert status == 0, output
    ours, theirs = tensors(tmp_path / "run"), tensors(tmp_path / "straight")
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def damage(path, how):
    content = path.read_bytes()
    middle = len(content) // 2
    if how == "truncated":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "flipped"])
@pytest.mark.parametrize("end", ["index", "data-00000-of-00001"])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path, straight, end, how):
    mode = "float32 one_device"
    reference, _ = straight(mode)
    model_dir = tmp_path / "run"
    shutil.copytree(reference, model_dir)
    newest = model_dir / "checkpoints" / f"step-240.{end}"
    damage(newest, how)
    status, output = finish(start(model_dir, *MODES[mode]))
    assert status == 0, output
    assert "step-240 is damaged" in output
    assert "and was moved to" in output
    assert "Restored step 225" in output
    assert (model_dir / "checkpoints" / "damaged" / "step-240" / newest.name).exists()
    assert_same_end(model_dir, reference)


@pytest.mark.slow
def test_without_a_good_checkpoint_nothing_is_begun_again(tmp_path, straight):
    mode = "float32 one_device"
    model_dir = tmp_path / "run"
    shutil.copytree(straight(mode)[0], model_dir)
    for index in (model_dir / "checkpoints").glob("*.index"):
        damage(index, "truncated")
    before = {path: path.stat().st_mtime_ns for path in sorted(model_dir.rglob("*"))}
    for _ in range(2):
        status, output = finish(start(model_dir, *MODES[mode]))
        assert status == 1
        assert "No checkpoint in" in output
        assert "Traceback" not in output
    assert {path: path.stat().st_mtime_ns for path in sorted(model_dir.rglob("*"))} == before
