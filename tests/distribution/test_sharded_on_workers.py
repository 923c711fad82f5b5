"""Two workers, each with its share of the optimizer's state, train as one device does."""

import numpy as np
import pytest

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.distribution.sharded_on_workers import ARGUMENTS, OVERFLOWS
from tests.distribution.whole_clusters import finish_all, free_addresses, start_worker
from tests.step.sharding.trainers import (
    adamw,
    after_an_overflow,
    assert_close,
    averages,
    make,
    slot_bytes,
    weights,
)


def of(trainer):
    return [*weights(trainer), *averages(trainer)]


@pytest.mark.processes
def test_two_workers_train_and_resume_as_one_device(tmp_path):
    """Also from the checkpoint of one device, and one device from that of the workers.

    Then with layers computed again alone, and after an overflow on one worker in mixed_float16.
    """
    set_precision("float64")
    one = make(make_strategy("one_device", 1), False, adamw, **ARGUMENTS)
    of_whole = slot_bytes(one)[0]
    one.train(3, progress=False)
    save(tmp_path / "one", one)
    one.train(2, progress=False)
    hosts = free_addresses(2)
    program = ("-m", "tests.distribution.sharded_on_workers", str(tmp_path))
    started = [start_worker(index, hosts, program=program) for index in (0, 1)]
    for status, output in finish_all(started, timeout=500):
        assert status == 0, output
    count = len(of(one))
    found = [dict(np.load(tmp_path / f"{index}.npz")) for index in (0, 1)]

    def named(worker, name):
        return [worker[f"{name}/{number}"] for number in range(count)]

    for worker in found:
        # A share of a bias of 5 entries is padded to 3.
        assert worker["bytes"][0] <= of_whole / 2 + 2 * 8 * 2
        assert_close(named(worker, "straight"), of(one))
        assert_close(named(worker, "sharded"), named(worker, "straight"), atol=0)
        assert_close(named(worker, "one"), of(one))
        assert_close(named(worker, "computed again"), of(one))
    assert_close(named(found[0], "straight"), named(found[1], "straight"), atol=0)
    resumed = make(make_strategy("one_device", 1), False, adamw, **ARGUMENTS)
    Checkpoints(tmp_path / "sharded", resumed).restore_latest()
    resumed.train(2, progress=False)
    assert_close(of(resumed), of(one))
    whole = after_an_overflow(make_strategy("mirrored", 2), False)
    whole.train(5, progress=False)
    assert (whole.skipped_updates, whole.loss_scale) == (1, 512)
    for worker, each in enumerate(found):
        expected = [copies[worker] for copies in in_pairs(of(whole))]
        expected.append(np.array([1, 512]))
        for name in OVERFLOWS:
            ours = [each[f"{name}/{number}"] for number in range(len(expected))]
            assert_close(ours, expected, atol=1e-6)


def in_pairs(copies):
    return zip(copies[::2], copies[1::2], strict=True)
