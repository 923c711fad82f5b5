"""The GPU's path of batches, arrays and gradients, run on virtual CPU devices."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from tests.conftest import LikeGpus, make_strategy, save
from tests.training.parity_cases import CASES, COMBINED, assert_small, differences, make_trainer
from tests.training.test_trainer import all_copies

RICH, SPARSE, NOISY = COMBINED
PADDED = "131 examples in batches of 32"

pytestmark = pytest.mark.usefixtures("gpu_path")


def strategy_on(replicas: int) -> tf.distribute.Strategy:
    return LikeGpus(replicas) if replicas > 1 else make_strategy("one_device", 1)


def check_parity(replicas: int, name: str) -> None:
    """Checks results, and that streams are distributed and resident examples are not."""
    strategy = strategy_on(replicas)
    assert_small(name, differences(name, strategy, "float64"), 1e-10)
    if replicas > 1:
        assert bool(strategy.distributed) == (name == NOISY)


@pytest.mark.parametrize(
    ("replicas", "name"),
    [(1, PADDED), (2, RICH), (2, NOISY), (2, SPARSE)],
)
def test_parity(replicas, name):
    check_parity(replicas, name)


def test_resumed_within_an_epoch_to_the_bit(tmp_path):
    """With padding, microbatches and an epoch's end after the resume; the loops' ends differ.

    The trainer of the run resumes, which has gone on: a second one would be traced again. Tables
    of resident rows begin anywhere, too (test_loop.py).
    """
    arguments = {"data_on_device": False, "accumulation_steps": 2, "steps_per_loop": 10}
    trainer = make_trainer(CASES[PADDED], LikeGpus(2), "float32", **arguments)
    trainer.train(3)
    save(tmp_path, trainer)
    trainer.train(2)
    trainer.train(4)
    straight = all_copies(trainer)
    ddl.Checkpoints(tmp_path, trainer).restore_latest()
    assert trainer.step == 3
    trainer.train(6)
    for ours, theirs in zip(all_copies(trainer), straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)
