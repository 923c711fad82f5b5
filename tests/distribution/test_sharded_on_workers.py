"""Two workers, each with its share of the optimizer's state, train as one device does.

`python -m tests.distribution.test_sharded_on_workers FOLDER` is a worker: it trains, resumes from
FOLDER/sharded, and writes its results to FOLDER/INDEX.npz.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.distribution.multi_worker import leaving
from ddl.distribution.strategies import build_strategy
from ddl.distribution.workers import Workers
from ddl.optimizers.weight_average import ExponentialMovingAverage
from ddl.precision import set_precision
from ddl.training.probes import Probe

AVERAGE = ExponentialMovingAverage(0.9)
ARGUMENTS = {"clip_norm": 0.3, "accumulation_steps": 2, "weight_average": AVERAGE}


def trained(strategy, sharded, folder=None, steps=0):
    """A trainer that restores the checkpoint of a folder, if there is one, and trains."""
    from tests.step.sharding.trainers import adamw, make

    set_precision("float64")
    trainer = make(strategy, sharded, adamw, **ARGUMENTS)
    if folder:
        Checkpoints(folder, trainer).restore_latest()
    trainer.train(steps, progress=False)
    return trainer


def of(trainer):
    from tests.step.sharding.trainers import averages, weights

    return [*weights(trainer), *averages(trainer)]


def main(folder: Path) -> None:
    strategy = build_strategy("auto")  # before any other operation
    Probe.check_rows = lambda *_: None  # type: ignore[method-assign]
    from tests.step.sharding.trainers import slot_bytes

    straight = trained(strategy, True, steps=3)
    checkpoints = Checkpoints(folder / "sharded", straight)
    checkpoints.save()
    straight.train(2, progress=False)
    checkpoints.finish()
    resumed = trained(strategy, True, folder / "sharded", 2)
    found = {"bytes": np.array(slot_bytes(straight))}
    for name, trainer in (("straight", straight), ("resumed", resumed)):
        found |= {f"{name}/{number}": value for number, value in enumerate(of(trainer))}
    np.savez(folder / f"{Workers(strategy).index}.npz", **found)


@pytest.mark.processes
def test_two_workers_train_and_resume_as_one_device(tmp_path):
    """One device goes on from the checkpoint of the workers, too."""
    from tests.conftest import make_strategy
    from tests.distribution.whole_clusters import finish_all, free_addresses, start_worker
    from tests.step.sharding.trainers import assert_close, slot_bytes

    device = make_strategy("one_device", 1)
    one = trained(device, False, steps=5)
    hosts = free_addresses(2)
    program = ("-m", "tests.distribution.test_sharded_on_workers", str(tmp_path))
    started = [start_worker(index, hosts, program=program) for index in (0, 1)]
    for status, output in finish_all(started, timeout=500):
        assert status == 0, output
    for index in (0, 1):
        found = dict(np.load(tmp_path / f"{index}.npz"))
        # A share of a bias of 5 entries is padded to 3.
        assert found["bytes"][0] <= slot_bytes(one)[0] / 2 + 2 * 8 * 2
        for name in ("straight", "resumed"):
            assert_close([found[f"{name}/{number}"] for number in range(len(of(one)))], of(one))
    assert_close(of(trained(device, False, tmp_path / "sharded", 2)), of(one))


if __name__ == "__main__":
    with leaving():
        main(Path(sys.argv[1]))
    os._exit(0)
