"""Several real workers on this machine, as `ddl.launch` starts them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.whole_runs import ROOT, lines, tensors

# A batch that 1, 2, 3 and 4 replicas with two microbatches can share.
PLAN = (
    *("GLOBAL_BATCH_SIZE = 72", "TRAIN_STEPS = 60", "EVAL_EVERY = 30"),
    *("CHECKPOINT_EVERY = 20", "LOG_EVERY = 20"),
)
REGULARIZED = "digits_cnn_regularized.gin"


def arguments(model_dir, *params, config=REGULARIZED):
    return [
        f"--gin_file={ROOT}/configs/{config}",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*PLAN, *params)),
    ]


def launch(workers, *flags, launcher=()) -> subprocess.Popen:
    command = [sys.executable, "-m", "ddl.launch", f"--num_workers={workers}", *launcher, "--"]
    return subprocess.Popen(
        [*command, *map(str, flags)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, timeout=120):
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def processes_of(model_dir) -> dict[int, int]:
    """Process numbers of the workers of a run, by their index."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
            environment = (folder / "environ").read_text()
        except OSError:
            continue
        if "ddl.main" in command and f"--model_dir={model_dir}" in command:
            index = environment.split('"index":')[1].strip()[0]
            found[int(index)] = int(folder.name)
    return found


def assert_none_left(model_dir):
    deadline = time.monotonic() + 20
    while processes_of(model_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(model_dir) == {}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one process and one device train, in float64."""
    model_dir = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "ddl.main", "--strategy=one_device"]
    done = subprocess.run(
        [*command, *arguments(model_dir, "PRECISION = 'float64'")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return model_dir


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (3, 1), (2, 2)])
def test_workers_train_what_one_device_does(tmp_path, one_device, workers, devices):
    """With dropout, augmentation, synchronized normalization, microbatches and an average."""
    model_dir = tmp_path / "run"
    flags = [] if devices == 1 else [f"--num_virtual_devices={devices}"]
    status, output = finish(launch(workers, *arguments(model_dir, "PRECISION = 'float64'"), *flags))
    assert status == 0, output
    assert f"replicas: {workers * devices}" in output
    assert output.count("done: step 60") == 1
    ours, theirs = tensors(model_dir), tensors(one_device)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if getattr(value, "dtype", None) == np.float64:
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-9, err_msg=name)
    assert [(x["step"], x["split"]) for x in lines(model_dir)] == [
        (x["step"], x["split"]) for x in lines(one_device)
    ]
    for ours_line, line in zip(lines(model_dir), lines(one_device), strict=True):
        assert ours_line["loss"] == pytest.approx(line["loss"], abs=1e-9)
    assert_none_left(model_dir)


@pytest.mark.slow
def test_rounded_gradients_train_the_same_in_processes_and_on_devices(tmp_path):
    """In several buffers, which travel between processes and are summed at once on devices."""
    plan = ["PRECISION = 'float64'", "Trainer.gradient_dtype = 'bfloat16'", "TRAIN_STEPS = 20"]
    status, output = finish(
        launch(3, *arguments(tmp_path / "workers", *plan), "--bytes_per_pack=4096")
    )
    assert status == 0, output
    command = [sys.executable, "-m", "ddl.main", "--strategy=mirrored", "--num_virtual_devices=3"]
    for name, params in {"devices": plan, "unrounded": [plan[0], plan[2]]}.items():
        subprocess.run([*command, *arguments(tmp_path / name, *params)], cwd=ROOT, check=True)
    ours, theirs = tensors(tmp_path / "workers"), tensors(tmp_path / "devices")
    unrounded = tensors(tmp_path / "unrounded")
    weights = [name for name in theirs if "kernel" in name]
    assert weights
    for name in weights:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9, err_msg=name)
        assert np.abs(theirs[name] - unrounded[name]).max() > 1e-6
    assert_none_left(tmp_path / "workers")


def wait_for(path: Path, process):
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_started_again_and_the_run_ends_the_same(tmp_path, victim):
    """To the bit, in the same shape."""
    plan = ["TRAIN_STEPS = 400", "EVAL_EVERY = 200", "CHECKPOINT_EVERY = 50"]
    status, output = finish(launch(2, *arguments(tmp_path / "straight", *plan)))
    assert status == 0, output
    model_dir = tmp_path / "run"
    process = launch(2, *arguments(model_dir, *plan), launcher=["--max_restarts=2"])
    wait_for(model_dir / "checkpoints" / "step-100.index", process)
    os.kill(processes_of(model_dir)[victim], signal.SIGKILL)
    status, output = finish(process)
    assert status == 0, output
    assert "restart 1 of 2" in output
    ours, theirs = tensors(model_dir), tensors(tmp_path / "straight")
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(model_dir) == lines(tmp_path / "straight")
    assert_none_left(model_dir)


@pytest.mark.slow
def test_workers_agree_on_the_step_at_which_they_stop(tmp_path):
    """One of them is asked; all save and end at the same step, with 75."""
    model_dir = tmp_path / "run"
    seldom = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000", "CHECKPOINT_EVERY = 100000"]
    process = launch(2, *arguments(model_dir, *seldom), launcher=[f"--log_dir={tmp_path}/logs"])
    while not process.stdout.readline().startswith("step 100 "):
        assert process.poll() is None
    os.kill(processes_of(model_dir)[1], signal.SIGTERM)
    status, output = finish(process)
    assert status == 75, output
    saved = tf.train.latest_checkpoint(str(model_dir / "checkpoints"))
    step = f"at step {int(saved.rpartition('-')[2]):,} of 100,000, after saving"
    assert step in output
    assert f"stopped by SIGTERM {step}" in (tmp_path / "logs" / "worker-1.log").read_text()
    assert_none_left(model_dir)


@pytest.mark.slow
def test_a_lost_worker_is_told_by_the_others(tmp_path):
    """Without a launcher that restarts."""
    model_dir = tmp_path / "run"
    plan = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000"]
    process = launch(2, *arguments(model_dir, *plan))
    wait_for(model_dir / "checkpoints" / "step-20.index", process)
    os.kill(processes_of(model_dir)[1], signal.SIGKILL)
    status, output = finish(process, timeout=40)
    assert status == 128 + signal.SIGKILL, output
    assert "worker 1" in output
    assert "SIGKILL" in output
    assert "Traceback" not in output
    assert_none_left(model_dir)


@pytest.mark.slow
def test_several_workers_refuse_what_one_process_does(tmp_path):
    model_dir = tmp_path / "run"
    status, output = finish(launch(2, *arguments(model_dir), "--mode=eval"))
    assert status == 1, output
    assert "--mode=eval runs in one process" in output
    assert not model_dir.exists() or not list(model_dir.glob("*.gin"))
