"""Each file of examples/ in mixed_float16: an overflow on one replica changes nothing anywhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl import config, microbatch
from ddl.distribution.communication import Communication
from ddl.distribution.workers import Workers
from ddl.run import train
from ddl.step.objective import Objective
from tests.conftest import make_strategy
from tests.examples.test_examples import EXAMPLES, ROOT, params
from tests.step.verbs.own_steps import copies

REPLICA, FIRST = 1, 3  # of fine_tuning, batch 2 has only padding on replica 1


@pytest.fixture
def overflows(monkeypatch):
    """Dict from the name of a loss to the batch in which it is infinite on one replica."""
    batches: dict[str, int] = {}
    weighed = Objective.weighed

    def overflowing(self, features, training):
        losses, *others = weighed(self, features, training)
        current, context = microbatch.current(), tf.distribute.get_replica_context()
        batch = batches.get(self._where.partition(".")[2])
        if batch is None or current is None or current.seed is None or context is None:
            return losses, *others
        here = tf.equal(context.replica_id_in_sync_group, REPLICA) & tf.equal(current.batch, batch)
        return losses * tf.cast(tf.where(here, np.inf, 1.0), losses.dtype), *others

    monkeypatch.setattr(Objective, "weighed", overflowing)
    return batches


def built(example):
    keras.utils.clear_session()
    scale = ("Trainer.loss_scale = @LossScale()", "LossScale.initial = 16.0")
    own = ("PRECISION = 'mixed_float16'", "Trainer.max_skipped_updates = 1", *scale)
    config.load([f"{ROOT}/examples/{example}.gin"], [*params(example), *own])
    strategy = make_strategy("mirrored", 2)
    return train.build(train.Placement(strategy, Communication()), Workers(strategy))[1]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_overflow_in_each_loss_in_turn(example, overflows):
    """Weights, slots, statistics, targets, averages and own variables keep their bits."""
    trainer = built(example)
    names = [*trainer._parts.update.plan.losses]
    overflows |= {name: FIRST + place for place, name in enumerate(names)}
    trainer.train(FIRST)
    before = copies(trainer)
    for skipped in range(1, len(names) + 1):
        state = trainer._runner.loop.run(trainer.state, FIRST + 1)
        assert (int(state.step), int(state.batches)) == (FIRST, FIRST + skipped)
        for ours, theirs in zip(copies(trainer), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        trainer.state = state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
    trainer.train(1)
    after = copies(trainer)
    for one, other in after:
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
    assert any((a[0] != b[0]).any() for a, b in zip(after, before, strict=True))
