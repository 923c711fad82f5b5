"""Two workers, each with its share of the optimizer's state, train as one device does.

`python -m tests.distribution.test_sharded_on_workers FOLDER` is a worker: it trains, goes back to
its checkpoint in FOLDER/sharded, trains again, and writes its results to FOLDER/INDEX.npz.
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
from tests.step.sharding import trainers

AVERAGE = ExponentialMovingAverage(0.9)
ARGUMENTS = {"clip_norm": 0.3, "accumulation_steps": 2, "weight_average": AVERAGE}


def trainer_of(strategy, sharded):
    set_precision("float64")
    return trainers.make(strategy, sharded, trainers.adamw, **ARGUMENTS)


def of(trainer):
    return [*trainers.weights(trainer), *trainers.averages(trainer)]


def main(folder: Path) -> None:
    strategy = build_strategy("auto")  # before any other operation
    Probe.check_rows = lambda *_: None  # type: ignore[method-assign]
    trainer = trainer_of(strategy, True)
    checkpoints = Checkpoints(folder / "sharded", trainer)
    trainer.train(3, progress=False)
    checkpoints.save()
    found = {"bytes": np.array(trainers.slot_bytes(trainer))}
    for name in ("straight", "resumed"):
        trainer.train(2, progress=False)
        found |= {f"{name}/{number}": value for number, value in enumerate(of(trainer))}
        checkpoints.finish()
        trainer = trainer_of(strategy, True)
        checkpoints = Checkpoints(folder / "sharded", trainer)
        checkpoints.restore_latest()
    np.savez(folder / f"{Workers(strategy).index}.npz", **found)


@pytest.mark.processes
def test_two_workers_train_and_resume_as_one_device(tmp_path):
    """One device continues from the checkpoint of the workers, too."""
    from tests.conftest import make_strategy
    from tests.distribution.whole_clusters import finish_all, free_addresses, start_worker

    one = trainer_of(make_strategy("one_device", 1), False)
    one.train(5, progress=False)
    expected = of(one)
    hosts = free_addresses(2)
    program = ("-m", "tests.distribution.test_sharded_on_workers", str(tmp_path))
    started = [start_worker(index, hosts, program=program) for index in (0, 1)]
    for status, output in finish_all(started, timeout=500):
        assert status == 0, output
    for index in (0, 1):
        found = dict(np.load(tmp_path / f"{index}.npz"))
        # A share of a bias of 5 entries is padded to 3.
        assert found["bytes"][0] <= trainers.slot_bytes(one)[0] / 2 + 2 * 8 * 2
        for name in ("straight", "resumed"):
            values = [found[f"{name}/{number}"] for number in range(len(expected))]
            trainers.assert_close(values, expected)
    Checkpoints(tmp_path / "sharded", one).restore_latest()
    one.train(2, progress=False)
    trainers.assert_close(of(one), expected)


if __name__ == "__main__":
    with leaving():
        main(Path(sys.argv[1]))
    os._exit(0)
