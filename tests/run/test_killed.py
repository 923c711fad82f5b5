"""Real runs, killed at random moments and started again: they end as if nothing had happened.

Every case trains with dropout, augmentation, synchronized normalization, two microbatches, an
average of the weights and momentum, and is started again until it is done.
"""

import os
import random
import signal
import time

import numpy as np
import pytest

from tests.distribution.whole_clusters import launch, processes_of
from tests.processes.stopping import stop_when
from tests.run.whole_runs import MODES, assert_same_end, command, finish, start, tensors

KILLS = 4  # two anywhere, two in a save


def kill_anywhere(process, model_dir, rng, start_up) -> None:
    """Kills it as it starts, or some lines and a moment after that, by how far it has come."""
    lines = rng.randrange(3)
    file, patience = model_dir / "metrics.jsonl", time.monotonic() + 300

    def written() -> int:
        return file.read_bytes().count(b"\n") if file.exists() else 0

    # Those that come after the last checkpoint are written again.
    before = written()
    if lines == 0:
        moment = time.monotonic() + rng.uniform(0.3, 1.0) * start_up
        # A start can take less time than the one that was measured.
        while time.monotonic() < moment and written() == before:
            time.sleep(0.0005)
        process.kill()
        return
    while process.poll() is None and time.monotonic() < patience:
        if written() != before:
            before, lines = written(), lines - 1
        if lines == 0:
            break
        time.sleep(0.0005)
    time.sleep(rng.uniform(0.0, 0.05))
    process.kill()


def kill_in_a_save(process, model_dir, rng) -> bool:
    """Waits for a save to begin, and kills within it; whether it came to that."""
    folder, patience = model_dir / "checkpoints", time.monotonic() + 300
    skip = rng.randrange(3)
    seen = set()

    def partial() -> set[str]:
        return {path.name for path in folder.glob("*.partial")} if folder.exists() else set()

    def wait() -> None:
        while process.poll() is None and time.monotonic() < patience:
            seen.update(found := partial())
            if found and len(seen) > skip:
                break
            time.sleep(0.0005)  # a save takes some milliseconds

    hit = process.poll() is None and stop_when(process.pid, lambda: bool(partial()), wait)
    process.kill()
    process.wait()
    return hit and bool(partial())


def stop_by_sigterm(process) -> None:
    """Stops a run after its first line, and expects it to save first."""
    output = ""
    while not output.startswith("step "):
        output = process.stdout.readline()
        assert process.poll() is None
    process.terminate()
    status, output = finish(process)
    assert status == 75, output
    assert "Training stopped on SIGTERM at step" in output
    assert "after saving. Run the same command to resume." in output


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_it_ends_the_same(tmp_path, straight, mode):
    """The run is also stopped by SIGTERM once, between two kills."""
    reference, start_up = straight(mode)
    rng = random.Random(mode)
    model_dir = tmp_path / "run"
    in_a_save = kills = 0
    for turn in range(40):
        process = start(model_dir, *MODES[mode])
        if turn == 3:
            stop_by_sigterm(process)
        elif kills < KILLS:
            if kills % 2:
                in_a_save += kill_in_a_save(process, model_dir, rng)
            else:
                kill_anywhere(process, model_dir, rng, start_up)
            finish(process)
            kills += process.returncode == -signal.SIGKILL
            assert process.returncode == -signal.SIGKILL or kills == KILLS, "it was done too soon"
        else:
            status, output = finish(process)
            assert status == 0, output
            break
    assert kills == KILLS
    assert in_a_save == 2
    assert_same_end(model_dir, reference)


def kill_after_a_save(process, model_dir, step, worker=None) -> None:
    """Kills a run, or one of its launched workers, once it has saved an update from `step` on."""
    patience = time.monotonic() + 300

    def saved() -> list[int]:
        files = (model_dir / "checkpoints").glob("step-*.index")
        return [int(file.stem.partition("-")[2]) for file in files]

    while process.poll() is None and time.monotonic() < patience:
        if max(saved(), default=0) >= step:
            break
        time.sleep(0.0005)
    if worker is None:
        process.kill()
    else:
        os.kill(processes_of(model_dir)[worker], signal.SIGKILL)
    status, output = finish(process)
    assert status == (-signal.SIGKILL if worker is None else 128 + signal.SIGKILL), output


@pytest.mark.slow
def test_killed_it_resumes_on_other_replicas_with_shares_and_without(tmp_path):
    """Slots are in shares, or whole.

    Two workers, 4 devices, 2 devices and one device take turns; all but the last are killed.
    """
    plan = ("TRAIN_STEPS = 120", "EVAL_EVERY = None", "Retention.best_metric = None")
    plan += ("cnn.batch_normalization = False",)
    shares = ("--shard_optimizer_state",)

    def run(folder, replicas, *flags):
        devices = ["--strategy=mirrored", f"--num_virtual_devices={replicas}"]
        return start(tmp_path / folder, "float64", [*devices, *flags], *plan)

    model_dir = tmp_path / "run"
    flags = command(model_dir, "float64", shares, *plan)[3:]
    kill_after_a_save(launch(2, *flags), model_dir, 15, worker=1)
    kill_after_a_save(run("run", 4), model_dir, 45)
    kill_after_a_save(run("run", 2, *shares), model_dir, 75)
    ends = [start(model_dir, "float64", ["--strategy=one_device"], *plan), run("straight", 2)]
    for status, output in map(finish, ends):
        assert status == 0, output
    ours, theirs = (tensors(tmp_path / folder) for folder in ("run", "straight"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if np.asarray(value).dtype.kind == "f":
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-10, err_msg=name)
    assert any("averages" in name for name in theirs)
    assert any(name.startswith("optimizer") and np.ndim(value) for name, value in theirs.items())
