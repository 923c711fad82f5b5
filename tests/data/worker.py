"""A worker that resumes a run on each kind of data; the chief writes how the runs ended."""

import sys
from pathlib import Path

import numpy as np

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.distribution import build_strategy
from ddl.distribution.workers import Workers
from tests.data.kinds import KINDS, SAVED, UPDATES, ends_of, make_trainer

if __name__ == "__main__":
    strategy, folder = build_strategy("multi_worker_mirrored"), Path(sys.argv[1])
    for kind in KINDS:
        trainer = make_trainer(KINDS[kind](folder), strategy)
        Checkpoints(folder / kind, trainer).restore_latest()
        assert trainer.step == SAVED
        ends = ends_of(trainer, UPDATES - SAVED)
        if Workers(strategy).is_chief:
            np.savez(folder / f"{kind}.npz", *ends)
    Workers(strategy).barrier()  # one that ends while the other reads would abort it
