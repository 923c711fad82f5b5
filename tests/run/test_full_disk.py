"""A real file system that is full or read-only; skipped where one cannot be mounted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.processes import forked
from tests.run.whole_runs import ROOT, finish

DIGITS = f"--gin_file={ROOT}/configs/digits_cnn.gin"
PLAN = ("TRAIN_STEPS = 60", "EVAL_EVERY = 30", "CHECKPOINT_EVERY = 10", "LOG_EVERY = 10")


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts so many bytes of memory as a file system."""
    mounted = []

    def mount(size: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=False)
        subprocess.run(["umount", str(folder)], check=True)


def run(model_dir, *params):
    command = [sys.executable, "-m", "ddl.main", DIGITS, f"--model_dir={model_dir}"]
    command += [f"--gin_param={param}" for param in (*PLAN, *params)]
    process = forked.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return finish(process)


@pytest.mark.slow
def test_a_disk_that_fills_up(small_disk, tmp_path):
    """The run goes to its end, says what it could not do, and loses nothing that was there."""
    disk = small_disk(2_000_000)
    model_dir = disk / "run"
    status, output = run(model_dir, "TRAIN_STEPS = 20", "Retention.last = 9")
    assert status == 0, output
    size = sum(path.stat().st_size for path in (model_dir / "checkpoints").glob("step-20.*"))
    (disk / "other").write_bytes(bytes(2_000_000 - 3 * size))
    before = {path.name: path.read_bytes() for path in (model_dir / "checkpoints").glob("step-*")}
    status, output = run(model_dir, "Retention.last = 9")
    assert status == 1
    assert "The checkpoint of step 60 could not be written" in output
    assert "Traceback" not in output
    for name, content in before.items():
        assert (model_dir / "checkpoints" / name).read_bytes() == content
    latest = tf.train.latest_checkpoint(str(model_dir / "checkpoints"))
    tf.train.load_checkpoint(latest)
    (disk / "other").unlink()
    status, output = run(model_dir, "Retention.last = 9")
    assert status == 0, output
    lines = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [10, 20, 30, 40, 50, 60]


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(small_disk):
    disk = small_disk(100_000)
    (disk / "other").write_bytes(bytes(98_000))
    status, output = run(disk / "run")
    assert status == 1
    assert "No space left on device" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_read_only_file_system(small_disk):
    disk = small_disk(100_000)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    status, output = run(disk / "run")
    assert status == 1
    assert f"{disk} cannot be written" in output
    assert "Traceback" not in output
