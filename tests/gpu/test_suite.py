"""The GPU suite: each place in a process of its own, and the commands on a GPU.

    python -m pytest -m gpu tests/gpu -k virtual_4

Each test ends after ten minutes at the latest. Its results are in the folder `gpu_results`. Skipped
without a GPU, but for a try of the suite's own code on CPU devices.
"""

import fcntl
import json
import subprocess
import sys

import pytest

from benchmarks import harness
from tests.gpu import suite
from tests.gpu.places import PLACES
from tests.processes import forked

SUITE = [sys.executable, "-m", "tests.gpu.suite"]


@pytest.fixture
def alone():
    """Virtual GPUs take all memory, so that two tests cannot share a GPU."""
    if not harness.gpus():
        pytest.skip("there is no GPU")
    suite.RESULTS.mkdir(parents=True, exist_ok=True)
    with open(suite.RESULTS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
def test_place(place, alone):
    if place.startswith("several") and len(harness.gpus()) < 2:
        pytest.skip("there is no GPU beside the first")
    subprocess.run([*SUITE, place], timeout=600, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), ("--gpus=0", "--num_virtual_devices=2")], ids=str)
def test_commands(flags, tmp_path, alone):
    """A run as a newcomer starts it, its evaluation and its export."""
    for mode in ("train_and_eval", "eval", "export"):
        command = [sys.executable, "-m", "ddl.main", "--gin_file=configs/digits_cnn.gin"]
        command += [f"--mode={mode}", f"--model_dir={tmp_path}/run", *flags]
        command += ["--strategy=mirrored"] if flags else []
        subprocess.run(command, check=True, timeout=500, cwd=harness.ROOT)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (*_, last) = (line for line in lines if line["split"] == "eval")
    assert last["accuracy"] > 0.95
    assert (tmp_path / "run" / "export").exists()


@pytest.mark.processes
def test_its_own_code_on_cpu_devices(tmp_path):
    command = [*SUITE, "virtual_2", f"--results={tmp_path}", "--on_cpu", "--only=draws,overflow"]
    ended = forked.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout
    found = json.loads((tmp_path / "virtual_2.json").read_text())
    assert set(found["checks"]) == {"draws", "overflow"}
