"""Real runs, killed at random moments and started again: they end as if nothing had happened.

Every case trains with dropout, augmentation, synchronized normalization, two microbatches, an
average of the weights and momentum, and is started again until it is done.
"""

import random
import signal
import time

import pytest

from tests.whole_runs import MODES, StraightRuns, assert_same_end, finish, start

KILLS = 6


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return StraightRuns(tmp_path_factory.mktemp("straight"))


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
