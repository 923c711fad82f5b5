"""The three passes over the microbatches of a loss across examples."""

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
import ddl.random
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.processes import forked
from tests.run.whole_runs import ROOT
from tests.step.across_examples.tasks import TASKS, InfoNce, build, copies
from tests.step.across_examples.test_same import UPDATES

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")
ONE = ("one_device", 1)


class OwnRows(InfoNce):
    """The loss reads no output of the model but the gathered rows."""

    def per_example(self, features, training):
        others = self.gather(self.embedded(features["x"], training))
        own = tf.gather(others.rows, others.own)
        logits = own @ tf.transpose(others.rows) / 0.5
        logits = tf.where(others.mask, logits, logits.dtype.min)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(others.own, logits)
        return ddl.PerExample(loss, {"zero": tf.zeros_like(loss)})


class EachAlone(InfoNce):
    """The same model without a loss across examples."""

    def per_example(self, features, training):
        loss = tf.reduce_sum(self.embedded(features["x"], training), axis=1)
        return ddl.PerExample(loss, {"found": loss})


class Counting(InfoNce):
    """Gathers whole numbers alone, so that no gradient flows through the gather."""

    def per_example(self, features, training):
        z = self.embedded(features["x"], training)
        others = self.gather(features["label"])
        same = (features["label"][:, tf.newaxis] == others.rows) & others.mask
        number = tf.reduce_sum(tf.cast(same, z.dtype), axis=1)
        return ddl.PerExample(number * tf.reduce_sum(z, axis=1))


class Drawing(InfoNce):
    """Draws all that may be drawn beside what is gathered, and before it."""

    def __init__(self, **made):
        super().__init__(**made)
        self.noise = keras.layers.GaussianNoise(0.1)
        hidden, *rest = self.model.layers
        layers = [keras.layers.Dropout(0.2), keras.layers.Reshape((2, 4)), keras.layers.LSTM(8)]
        self.model = keras.Sequential([keras.Input((6,)), hidden, *layers, *rest])

    def gather(self, x):
        x = x + tf.cast(ddl.random.normal(self, x.shape), x.dtype)
        return super().gather(self.noise(x + keras.random.uniform(x.shape), training=True))

    def per_example(self, features, training):
        loss, metrics, _ = super().per_example(features, training)
        return ddl.PerExample(loss + tf.random.uniform(loss.shape, dtype=loss.dtype), metrics)


@pytest.fixture(autouse=True)
def _more_tasks(monkeypatch):
    for task in (OwnRows, EachAlone, Counting, Drawing):
        monkeypatch.setitem(TASKS, task.__name__, task)


def trained(name, where=ONE, updates=UPDATES, **options):
    trainer = build(name, make_strategy(*where), **options)
    trainer.train(updates)
    return trainer


def assert_same(ours, theirs, tolerance=1e-10):
    for all_copies, (value, *_) in zip(copies(ours), copies(theirs), strict=True):
        for copy in all_copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["OwnRows", "Counting"])
def test_four_microbatches_equal_one(name):
    assert_same(trained(name, accumulation_steps=4), trained(name))


def test_draws_that_repeat_and_those_after_the_gather_are_no_error():
    trained("Drawing", accumulation_steps=2, updates=1)


def test_moments_of_each_microbatch_on_two_replicas():
    """BatchNormalization takes moments of a microbatch; they are the same on two replicas."""
    options = {"made": {"normalized": True}, "accumulation_steps": 2}
    assert_same(trained("InfoNce", ("mirrored", 2), **options), trained("InfoNce", **options))


def check_statistics():
    """The three passes leave the moving moments of a single one."""
    options = {"made": {"normalized": True, "dropout": False}, "accumulation_steps": 4}
    moved = [trained(name, updates=1, **options) for name in ("OwnRows", "EachAlone")]
    layer, other = (trainer.task.model.layers[1] for trainer in moved)
    assert np.abs(layer.moving_mean.numpy()).max() > 1e-4
    np.testing.assert_allclose(layer.moving_mean, other.moving_mean, rtol=0, atol=1e-15)
    np.testing.assert_allclose(layer.moving_variance, other.moving_variance, rtol=0, atol=1e-15)


@pytest.mark.slow
def test_four_microbatches_take_the_memory_of_one():
    """Three passes over four microbatches, against one microbatch alone, and all rows at once."""
    command = [sys.executable, "-m", "tests.step.across_examples.memory"]
    done = forked.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    one, passes, at_once = json.loads(done.stdout.splitlines()[-1])
    assert passes < 1.25 * one
    assert at_once > 2 * one


def test_moving_statistics_move_once():
    check_statistics()


def test_a_variable_that_no_loss_reads_is_refused():
    def unused(task):
        task.embedded = lambda x, training: task.model.layers[0](x)

    trainer = build("InfoNce", make_strategy(*ONE), accumulation_steps=2, change=unused)
    with pytest.raises(ConfigError, match="does not depend on the trainable variables"):
        trainer.trace()


def test_other_tensors_than_in_the_trial_are_refused():
    trainer = build("Covariances", make_strategy(*ONE), accumulation_steps=2)
    gather = trainer.task.gather
    trainer.task.gather = lambda x: gather(x[:, :2])
    with pytest.raises(ConfigError, match="must gather the same tensors in each trace"):
        trainer._runner.trace()


def test_an_overflow_skips_the_update():
    def overflowing(task):
        per_example = task.per_example

        def overflow(features, training):
            output = per_example(features, training)
            factor = tf.where(ddl.current_batch().positions == 3, 1e38, 1.0)
            return output._replace(loss=output.loss * tf.cast(factor, output.loss.dtype))

        task.per_example = overflow

    trainer = build(
        "InfoNce",
        make_strategy(*ONE),
        precision="mixed_float16",
        accumulation_steps=2,
        change=overflowing,
        max_skipped_updates=3,
        made={"normalized": True},
    )
    before = copies(trainer)
    with pytest.raises(ddl.errors.TrainingDiverged):
        trainer.train(4)
    for now, earlier in zip(copies(trainer), before, strict=True):
        np.testing.assert_array_equal(now, earlier)
