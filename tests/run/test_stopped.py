"""Real runs that are asked to stop, or find their newest checkpoint damaged."""

import shutil
import time

import numpy as np
import pytest

from tests.run.whole_runs import MODES, assert_same_end, finish, lines, start, tensors


def step_of(model_dir) -> int:
    return int(tensors(model_dir)["state/step/.ATTRIBUTES/VARIABLE_VALUE"])


def stop_in_its_loop(model_dir, *arguments) -> int:
    """Stops a run within its first loop, and returns the step that it saved."""
    for pause in (1, 3, 10, 30):  # the first updates wait for TensorFlow to optimize the graph
        process = start(model_dir, *arguments)
        while not (model_dir / "operative_config.gin").exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(pause)
        process.terminate()
        status, output = finish(process)
        assert status == 75, output
        if "after saving. Run the same command to resume." in output and step_of(model_dir):
            assert f"Training stopped on SIGTERM at step {step_of(model_dir):,}" in output
            break
        shutil.rmtree(model_dir)
    return step_of(model_dir)


@pytest.mark.slow
def test_sigterm_cuts_a_long_loop_short(tmp_path):
    """One loop of a million updates, with nothing to do in between."""
    million = 1_000_000
    seldom = [f"{name} = {million}" for name in ("EVAL_EVERY", "CHECKPOINT_EVERY", "LOG_EVERY")]
    arguments = ("float32", [f"--steps_per_loop={million}"], *seldom)
    step = stop_in_its_loop(tmp_path / "run", *arguments, f"TRAIN_STEPS = {million}")
    assert 0 < step < million
    for name in ("run", "straight"):
        status, output = finish(start(tmp_path / name, *arguments, f"TRAIN_STEPS = {step + 50}"))
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
@pytest.mark.parametrize(
    "damages",
    [
        {240: ("index", "truncated"), 225: ("data-00000-of-00001", "flipped")},
        {240: ("data-00000-of-00001", "truncated"), 225: ("index", "flipped")},
    ],
    ids=str,
)
def test_damaged_checkpoints_cost_the_steps_since_the_one_before(tmp_path, straight, damages):
    mode = "float32 one_device"
    reference, _ = straight(mode)
    model_dir = tmp_path / "run"
    shutil.copytree(reference, model_dir)
    for step, (end, how) in damages.items():
        damage(model_dir / "checkpoints" / f"step-{step}.{end}", how)
    status, output = finish(start(model_dir, *MODES[mode]))
    assert status == 0, output
    for step, (end, _) in damages.items():
        assert f"step-{step} is damaged" in output
        folder = model_dir / "checkpoints" / "damaged" / f"step-{step}"
        assert (folder / f"step-{step}.{end}").exists()
    assert output.count("and was moved to") == 2
    assert "Restored step 210" in output
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
