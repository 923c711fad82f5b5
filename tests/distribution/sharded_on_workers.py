"""Trains with the optimizer's state and averages in shares on the workers, and resumes.

Each worker writes its results to FOLDER/INDEX.npz. The checkpoints are in FOLDER/sharded.
"""

import os
import sys
from pathlib import Path

import numpy as np

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.distribution.multi_worker import leaving
from ddl.distribution.strategies import build_strategy
from ddl.distribution.workers import Workers
from ddl.precision import set_precision
from ddl.step.probes import Probe
from ddl.step.weight_average import ExponentialMovingAverage
from ddl.training.trainer import Trainer

ARGUMENTS = {
    "clip_norm": 0.3,
    "accumulation_steps": 2,
    "weight_average": ExponentialMovingAverage(0.9),
}


def main(folder: Path) -> None:
    strategy = build_strategy("auto")  # before any other operation
    Probe.check_rows = lambda *_: None  # type: ignore[method-assign]
    from tests.step.sharding.trainers import adamw, averages, make, slot_bytes, weights

    def of(trainer: Trainer) -> list[np.ndarray]:
        return [*weights(trainer), *averages(trainer)]

    set_precision("float64")
    straight = make(strategy, True, adamw, **ARGUMENTS)
    found = {"bytes": np.array(slot_bytes(straight))}
    checkpoints = Checkpoints(folder / "sharded", straight)
    straight.train(3, progress=False)
    checkpoints.save()
    straight.train(2, progress=False)
    checkpoints.finish()
    found |= {f"straight/{number}": value for number, value in enumerate(of(straight))}
    resumed = make(strategy, True, adamw, **ARGUMENTS)
    Checkpoints(folder / "sharded", resumed).restore_latest()
    resumed.train(2, progress=False)
    found |= {f"resumed/{number}": value for number, value in enumerate(of(resumed))}
    np.savez(folder / f"{Workers(strategy).index}.npz", **found)


if __name__ == "__main__":
    with leaving():
        main(Path(sys.argv[1]))
    os._exit(0)
