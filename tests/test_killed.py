"""Real runs, killed at random moments and started again: they end as if nothing had happened.

Every case trains with dropout, augmentation, synchronized normalization, two microbatches, an
average of the weights and momentum, and is started again until it is done.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

ROOT = Path(__file__).parent.parent
KILLS = 6
PLAN = (
    *("TRAIN_STEPS = 240", "EVAL_EVERY = 40", "CHECKPOINT_EVERY = 15", "LOG_EVERY = 10"),
    "Retention.best_metric = 'accuracy'",
)
MODES = {
    "float32 one_device": ("float32", ["--strategy=one_device"]),
    "float32 mirrored": ("float32", ["--strategy=mirrored", "--num_virtual_devices=2"]),
    "mixed_float16 one_device": ("mixed_float16", ["--strategy=one_device"]),
    "mixed_float16 mirrored": ("mixed_float16", ["--strategy=mirrored", "--num_virtual_devices=2"]),
}


def command(model_dir, precision, flags, *params):
    return [
        sys.executable,
        "-m",
        "ddl.main",
        f"--gin_file={ROOT}/configs/digits_cnn_regularized.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*PLAN, f"PRECISION = '{precision}'", *params)),
        *flags,
    ]


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process, timeout=300):
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def tensors(model_dir) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def lines(model_dir):
    found = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    for line in found:
        line.pop("examples_per_second", None)
    return found


def assert_same_end(model_dir, reference):
    ours, theirs = tensors(model_dir), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(model_dir) == lines(reference)
    steps = [(line["step"], line["split"]) for line in lines(model_dir)]
    assert len(set(steps)) == len(steps)
    assert {step for step, split in steps if split == "train"} == set(range(10, 250, 10))
    assert {step for step, split in steps if split == "eval"} == set(range(40, 250, 40))
    assert not list((model_dir / "checkpoints").glob("*.partial"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The uninterrupted run of a case, made once, and how long it took."""
    made = {}

    def run(mode):
        if mode not in made:
            model_dir = tmp_path_factory.mktemp("straight") / "run"
            began = time.monotonic()
            status, output = finish(start(model_dir, *MODES[mode]))
            assert status == 0, output
            made[mode] = model_dir, time.monotonic() - began
        return made[mode]

    return run


def kill_in_a_save(process, model_dir, rng) -> bool:
    """Waits for a save to begin, and kills within it; whether it came to that."""
    folder, patience = model_dir / "checkpoints", time.monotonic() + 60
    skip = rng.randrange(4)
    seen = set()
    while process.poll() is None and time.monotonic() < patience:
        partial = {path.name for path in folder.glob("*.partial")} if folder.exists() else set()
        seen |= partial
        if partial and len(seen) > skip:
            process.kill()
            process.wait()
            return bool(list(folder.glob("*.partial")))
    process.kill()
    process.wait()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_it_ends_the_same(tmp_path, straight, mode):
    reference, seconds = straight(mode)
    rng = random.Random(mode)
    model_dir = tmp_path / "run"
    in_a_save = kills = 0
    for turn in range(40):
        process = start(model_dir, *MODES[mode])
        if kills < KILLS:
            if turn % 2:
                in_a_save += kill_in_a_save(process, model_dir, rng)
            else:
                time.sleep(rng.uniform(0.3, 0.9) * seconds)
                process.kill()
            finish(process)
            kills += process.returncode == -signal.SIGKILL
        else:
            status, output = finish(process)
            assert status == 0, output
            break
    assert kills == KILLS
    assert in_a_save
    assert_same_end(model_dir, reference)


def stop(process) -> str:
    """Asks for a stop and waits for it; what the run said."""
    asked = time.monotonic()
    process.terminate()
    status, output = finish(process)
    assert status == 75, output
    assert time.monotonic() - asked < 5
    assert "stopped by SIGTERM at step" in output
    assert "The same command goes on from there" in output
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
    time.sleep(3)
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
    assert "it was set aside in" in output
    assert "restored step 225" in output
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
        assert "no checkpoint in" in output
        assert "Traceback" not in output
    assert {path: path.stat().st_mtime_ns for path in sorted(model_dir.rglob("*"))} == before
