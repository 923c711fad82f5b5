"""Two workers in network namespaces of their own, on a wire that delays, loses and is cut."""

import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.distribution.lossy_wire import ADDRESSES
from tests.distribution.whole_clusters import (
    arguments,
    assert_none_left,
    finish,
    finish_all,
    launch,
    start_worker,
    wait_for,
)
from tests.run.whole_runs import ROOT, lines, tensors

DELAY, LOSS = 0.005, 0.02
HOSTS = [f"{address}:2222" for address in ADDRESSES]
PLAN = ("TRAIN_STEPS = 120", "EVAL_EVERY = 60", "CHECKPOINT_EVERY = 10", "LOG_EVERY = 10")
LIMITS = ("--join_timeout=60", "--peer_timeout=8", "--stall_timeout=60")


class Wire:
    """Two namespaces and what joins them."""

    def __init__(self):
        self.namespaces = [f"ddl-{os.getpid()}-{end}" for end in (0, 1)]
        self._process = None

    def lay(self, delay, loss):
        for name in self.namespaces:
            run("ip", "netns", "add", name)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.distribution.lossy_wire",
                *self.namespaces,
                str(delay),
                str(loss),
                "1",
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._process.stdout.readline() != "ready\n":
            raise OSError(self._process.stderr.read().strip().splitlines()[-1])

    def tell(self, what):
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def remove(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, flags):
        """A worker at each end."""
        return [
            start_worker(index, HOSTS, *flags, prefix=("ip", "netns", "exec", name))
            for index, name in enumerate(self.namespaces)
        ]


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def wire():
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    wire = Wire()
    try:
        wire.lay(DELAY, LOSS)
    except OSError as error:
        wire.remove()
        pytest.skip(f"network namespaces and TUN devices are not permitted here: {error}")
    yield wire
    wire.remove()


def flags(model_dir):
    return [*arguments(model_dir, *PLAN, config="digits_mlp.gin"), *LIMITS]


def assert_same(model_dir, reference):
    ours, theirs = tensors(model_dir), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(model_dir) == lines(reference)


@pytest.mark.slow
def test_trouble_slows_a_run_or_ends_it_and_never_changes_it(tmp_path, wire):
    """Delay, loss and a short cut slow it; a long cut ends both, and they can go on."""
    model_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    status, output = finish(launch(2, *flags(undisturbed)))
    assert status == 0, output
    checkpoints = model_dir / "checkpoints"
    workers = wire.start(flags(model_dir))
    try:
        wait_for(checkpoints / "step-20.index", workers[0])
        wire.tell("cut")
        time.sleep(2)
        there = sorted(checkpoints.glob("*.index"))
        time.sleep(1)
        assert sorted(checkpoints.glob("*.index")) == there  # it was cut
        wire.tell("mend")
        later = int(there[-1].stem.removeprefix("step-")) + 20
        wait_for(checkpoints / f"step-{later}.index", workers[0])
        wire.tell("cut")
    finally:
        ended = finish_all(workers, timeout=150)
    for index, (status, output) in enumerate(ended):
        assert status == 77, output
        assert f"Worker {1 - index} at {HOSTS[1 - index]} was unreachable for 8 s" in output
    assert_none_left(model_dir)
    wire.tell("mend")
    for status, output in finish_all(wire.start(flags(model_dir))):
        assert status == 0, output
    assert_same(model_dir, undisturbed)
    assert_none_left(model_dir)
