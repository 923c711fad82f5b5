"""Workers under the launcher, killed at random moments: with restarts they end as if undisturbed.

They train with dropout, augmentation, synchronized normalization, microbatches, an average of the
weights and momentum.
"""

import os
import queue
import random
import signal
import threading
import time

import numpy as np
import pytest

from tests.distribution.whole_clusters import arguments, assert_none_left, launch, processes_of
from tests.processes.stopping import stop_when
from tests.run.whole_runs import lines, tensors

MOMENTS = ("start", "step", "save")
PLAN = ("TRAIN_STEPS = 360", "EVAL_EVERY = 180", "CHECKPOINT_EVERY = 15", "LOG_EVERY = 5")
LIMITS = ("--join_timeout=40", "--peer_timeout=8", "--stall_timeout=8")


class Watched:
    """A launcher's output, read as it comes, and what its run is at."""

    def __init__(self, process, model_dir):
        self.process = process
        self.output: list[str] = []
        self._checkpoints = model_dir / "checkpoints"
        self._model_dir = model_dir
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)

    def heard(self) -> list[str]:
        """What it wrote since the last call."""
        new = []
        while not self._lines.empty():
            new.append(self._lines.get())
        self.output += new
        return new

    def partial(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self._checkpoints.glob("*.partial"))

    def wait(self, condition, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.001)

    def workers(self, number) -> dict[int, int]:
        """The processes of all workers, once there are so many."""
        self.wait(lambda: len(processes_of(self._model_dir)) == number)
        return processes_of(self._model_dir)

    def trains(self) -> bool:
        return any(line.startswith("step ") for line in self.heard())

    def text(self) -> str:
        time.sleep(0.3)
        self.heard()
        return "".join(self.output)


def strike(watched, rng, victim, moment, number=signal.SIGKILL, start_up=4.0) -> bool:
    """Waits for the moment and sends the signal; whether that was still the moment.

    From the start to the first update it takes `start_up` seconds.
    """
    watched.heard()
    workers = watched.workers(2)
    pid = workers[victim]
    if moment == "start":  # of which reading TensorFlow takes most, and meeting comes late
        time.sleep(rng.uniform(0, 0.8) * start_up)
        os.kill(pid, number)
        return not watched.trains()
    watched.wait(watched.trains)
    time.sleep(rng.uniform(0, 0.05))
    if moment == "step":
        watched.wait(lambda: not watched.partial())
        os.kill(pid, number)
        return True
    skip = rng.randrange(2)  # saves to let pass
    for _ in range(skip):
        watched.wait(watched.partial)
        watched.wait(lambda: not watched.partial())
    # The chief writes. A save takes some milliseconds, so the chief is stopped within it first.
    hit = stop_when(workers[0], watched.partial, lambda: watched.wait(watched.partial))
    os.kill(pid, number)
    if victim != 0:
        os.kill(workers[0], signal.SIGCONT)
    return hit


@pytest.mark.slow
def test_killed_at_random_with_restarts_it_ends_the_same(tmp_path):
    began = time.monotonic()
    straight = Watched(launch(2, *arguments(tmp_path / "straight", *PLAN)), tmp_path / "straight")
    straight.wait(straight.trains)
    start_up = time.monotonic() - began
    straight.process.wait(timeout=300)
    assert straight.process.returncode == 0, straight.text()
    rng = random.Random("killed workers")
    cases = [(victim, moment) for moment in MOMENTS for victim in (0, 1)]
    rng.shuffle(cases)
    cases.insert(3, (0, "stopped"))
    cases.insert(6, (1, "stopped"))
    model_dir = tmp_path / "run"
    wanted = set(cases)
    restarts = f"--max_restarts={3 * len(cases)}"
    process = launch(2, *arguments(model_dir, *PLAN), *LIMITS, launcher=[restarts])
    watched = Watched(process, model_dir)
    hits = set()
    try:
        for count, (victim, moment) in enumerate(cases, start=1):
            if moment == "stopped":
                hit = strike(watched, rng, victim, "step", signal.SIGSTOP)
            else:
                hit = strike(watched, rng, victim, moment, start_up=start_up)
            if hit:
                hits.add((victim, moment))
            elif len(cases) < 2 * len(wanted):
                cases.append((victim, moment))  # the moment had passed: again, after the others
            restart = f"Restart {count} of"
            watched.wait(lambda restart=restart: restart in watched.text())
        process.wait(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, watched.text()
    assert hits == wanted, watched.text()
    assert_none_left(model_dir)
    ours, theirs = tensors(model_dir), tensors(tmp_path / "straight")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(model_dir) == lines(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "moment"), [(1, "start"), (1, "step"), (0, "save")])
def test_killed_without_restarts_all_are_gone_and_the_dead_is_named(tmp_path, victim, moment):
    model_dir = tmp_path / "run"
    log_dir = f"--log_dir={tmp_path}/logs"
    plan = ("TRAIN_STEPS = 100000", *PLAN[1:])
    process = launch(2, *arguments(model_dir, *plan), *LIMITS, launcher=[log_dir])
    watched = Watched(process, model_dir)
    try:
        assert strike(watched, random.Random(f"{victim} {moment}"), victim, moment)
        process.wait(timeout=90)  # the launcher's grace, and what TensorFlow takes to end
    finally:
        process.kill()
    assert_none_left(model_dir)
    assert process.returncode == 128 + signal.SIGKILL
    # The other worker may be gone when the launcher looks, if the kernel frees memory slowly.
    assert f"worker {victim} was killed by SIGKILL." in watched.text()


@pytest.mark.slow
def test_stopped_without_restarts_all_are_gone_and_the_stopped_is_named(tmp_path):
    model_dir = tmp_path / "run"
    plan = ("TRAIN_STEPS = 100000", *PLAN[1:])
    process = launch(2, *arguments(model_dir, *plan), *LIMITS)
    watched = Watched(process, model_dir)
    try:
        strike(watched, random.Random(0), 0, "step", signal.SIGSTOP)
        process.wait(timeout=120)
    finally:
        process.kill()
    assert_none_left(model_dir)
    text = watched.text()
    assert "worker 1 ended with status 77. The launcher stops the other" in text
    assert "Worker 0 at 127.0.0.1:" in text
    assert "did not respond for 8 s" in text
    assert process.returncode == 77, text
