"""Averages of the weights; tests/contract/test_parity.py compares them with the rule.

tests/contract/test_resume.py and test_overflow.py hold that they are saved, and skip an update.
"""

from contextlib import suppress

import numpy as np
import pytest

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.training.test_trainer import make_trainer, weights_and_slots

RULE = ddl.ExponentialMovingAverage(0.9)


def averages(trainer):
    return [v.numpy() for v in trainer.averages.variables]


def weights(trainer):
    return [v.numpy() for v in trainer.model.variables]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_evaluation_of_the_average_leaves_training_alone():
    """Also after an error."""
    trainer = make_trainer(make_strategy("mirrored", 2), weight_average=RULE, precision="float32")
    trainer.model.set_weights([one + 1 for one in weights(trainer)])  # as those of a file
    assert trainer.evaluate() == trainer.evaluate(averaged=False)
    trainer.train(5)
    before = weights_and_slots(trainer) + averages(trainer)
    trainer.evaluate()
    assert_same(weights_and_slots(trainer) + averages(trainer), before)
    with suppress(RuntimeError), trainer.evaluation_weights():
        assert_same(weights(trainer), averages(trainer))
        raise RuntimeError
    assert_same(weights_and_slots(trainer) + averages(trainer), before)
    trainer.train(1)


def test_neither_trains_nor_saves_nor_restores_with_the_average_in_place(tmp_path):
    trainer = make_trainer(make_strategy("one_device", 1), weight_average=RULE)
    checkpoints = Checkpoints(tmp_path, trainer)
    for refused in (lambda: trainer.train(1), checkpoints.save, checkpoints.restore_latest):
        with trainer.evaluation_weights(), pytest.raises(ConfigError, match="evaluation weights"):
            refused()
    assert not list(tmp_path.iterdir())
