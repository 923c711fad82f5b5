"""The GPU suite: each place in a process of its own, and the commands on a GPU.

    python -m pytest -m gpu tests/gpu -k virtual_4

Each test ends after ten minutes at the latest. Its results are in the folder `gpu_results`, or in
the one that the environment variable DDL_GPU_RESULTS names. Skipped without a GPU.
"""

import fcntl
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import suite

RESULTS = Path(os.environ.get("DDL_GPU_RESULTS", suite.RESULTS))
CONFIG = Path(__file__).parents[2] / "configs" / "digits_cnn.gin"
PLACES = {
    "one": 1,
    "one_deterministic": 1,
    "virtual_2": 1,
    "virtual_2_deterministic": 1,
    "virtual_4": 1,
    "several": 2,
    "several_deterministic": 2,
}
"""The GPUs that each needs."""

pytestmark = pytest.mark.gpu


@functools.cache
def gpus() -> int:
    """The GPUs of this machine, counted by a process that ends: this one hides them."""
    code = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else 0


@pytest.fixture(autouse=True)
def _alone():
    """Virtual GPUs take all memory, so that two tests cannot share a GPU."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        pytest.skip("there is no GPU")
    if not gpus():
        pytest.skip("TensorFlow sees no GPU")
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("place", PLACES)
def test_place(place):
    if gpus() < PLACES[place]:
        pytest.skip(f"there is {gpus()} GPU")
    command = [sys.executable, "-m", "tests.gpu.suite", place, f"--results={RESULTS}"]
    subprocess.run(command, timeout=600)
    found = json.loads((RESULTS / f"{place}.json").read_text())["checks"]
    bad = {name: suite.summary(check) for name, check in found.items() if not check["good"]}
    assert not bad, "\n".join(f"{name}: {text}" for name, text in bad.items())


@pytest.mark.parametrize("flags", [(), ("--gpus=0", "--num_virtual_devices=2")], ids=str)
def test_commands(flags, tmp_path):
    """A run as a newcomer starts it, its evaluation and its export."""
    found = {}
    for mode in ("train_and_eval", "eval", "export"):
        command = [sys.executable, "-m", "ddl.main", f"--gin_file={CONFIG}", f"--mode={mode}"]
        start = time.monotonic()
        own = [*flags, *(["--strategy=mirrored"] if flags else [])]
        subprocess.run([*command, f"--model_dir={tmp_path}/run", *own], check=True, timeout=500)
        found[f"{mode}, seconds"] = time.monotonic() - start
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (*_, last) = (line for line in lines if line["split"] == "eval")
    found["accuracy"] = last["accuracy"]
    name = "commands_virtual.json" if flags else "commands.json"
    (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")
    assert last["accuracy"] > 0.95
    assert (tmp_path / "run" / "export").exists()
