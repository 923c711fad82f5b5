"""Two workers, each with its share of the optimizer's state, train as one device does."""

import numpy as np
import pytest

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.distribution.sharded_on_workers import ARGUMENTS
from tests.distribution.whole_clusters import finish_all, free_addresses, start_worker
from tests.step.sharding.trainers import adamw, assert_close, averages, make, slot_bytes, weights


def of(trainer):
    return [*weights(trainer), *averages(trainer)]


@pytest.mark.processes
def test_two_workers_train_and_resume_as_one_device(tmp_path):
    """One device goes on from the checkpoint of the workers, too."""
    set_precision("float64")
    one = make(make_strategy("one_device", 1), False, adamw, **ARGUMENTS)
    of_whole = slot_bytes(one)[0]
    one.train(5, progress=False)
    hosts = free_addresses(2)
    program = ("-m", "tests.distribution.sharded_on_workers", str(tmp_path))
    started = [start_worker(index, hosts, program=program) for index in (0, 1)]
    for status, output in finish_all(started, timeout=500):
        assert status == 0, output
    for index in (0, 1):
        found = dict(np.load(tmp_path / f"{index}.npz"))
        # A share of a bias of 5 entries is padded to 3.
        assert found["bytes"][0] <= of_whole / 2 + 2 * 8 * 2
        for name in ("straight", "resumed"):
            assert_close([found[f"{name}/{number}"] for number in range(len(of(one)))], of(one))
    resumed = make(make_strategy("one_device", 1), False, adamw, **ARGUMENTS)
    Checkpoints(tmp_path / "sharded", resumed).restore_latest()
    resumed.train(2, progress=False)
    assert_close(of(resumed), of(one))
