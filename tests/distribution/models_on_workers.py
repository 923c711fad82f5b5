"""Trains each case of tests/training/model_cases.py, straight and resumed, on the workers.

Each worker writes its results to FOLDER/INDEX/CASE.npz. The checkpoints are in FOLDER/CASE.
"""

import os
import sys
from pathlib import Path

import numpy as np

from ddl.distribution.multi_worker import leaving
from ddl.distribution.strategies import build_strategy
from ddl.distribution.workers import Workers
from ddl.training.checks.row_independence import RowIndependence


def main(folder: Path) -> None:
    strategy = build_strategy("auto")  # before any other operation
    # tests/training/test_models_and_tasks.py checks the rows of each task.
    RowIndependence.check = lambda *_: None  # type: ignore[method-assign]
    from tests.training.model_cases import ALL, assert_same, make_trainer, resumed, straight

    own = folder / f"{Workers(strategy).index}"
    own.mkdir()
    for name in ALL:
        trainer = make_trainer(name, strategy)
        found = straight(trainer, folder / name)
        assert_same(resumed(trainer, folder / name), found)
        np.savez(own / f"{name}.npz", **found)


if __name__ == "__main__":
    with leaving():
        main(Path(sys.argv[1]))
    os._exit(0)
