import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.distribution.workers import Workers
from ddl.errors import TrainingDiverged
from ddl.training.divergence import VariablesFinite
from tests.conftest import make_strategy
from tests.training.test_trainer import overflowing_trainer

ONE = Workers(make_strategy("one_device", 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_variable_that_is_not_finite_is_named(strategy, bad):
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0], name=name) for name in ("one", "two", "three")]
        variables.append(tf.Variable(3, name="count"))
    check = VariablesFinite(variables, ONE)
    check.check(1)
    for variable in variables[1:3]:
        variable.assign([0.0, bad])
    with pytest.raises(TrainingDiverged, match="at step 7: two is not finite"):
        check.check(7)


def test_large_numbers_are_finite():
    variable = tf.Variable([3e38, -3e38])
    VariablesFinite([variable], ONE).check(1)


def test_what_is_infinite_by_design_stays_so():
    mask, weight = tf.Variable([0.0, -np.inf]), tf.Variable(1.0, name="weight")
    check = VariablesFinite([mask, weight], ONE)
    check.check(1)
    weight.assign(np.nan)
    with pytest.raises(TrainingDiverged, match="weight"):
        check.check(2)
    VariablesFinite([mask], ONE).check(3)


def test_on_any_dtype():
    with make_strategy("one_device", 1).scope():
        variables = [tf.Variable(1.0, dtype=t) for t in (tf.float16, tf.bfloat16, tf.float64)]
    check = VariablesFinite(variables, ONE)
    check.check(1)
    variables[1].assign(tf.constant(np.inf, tf.bfloat16))
    with pytest.raises(TrainingDiverged):
        check.check(2)


@pytest.mark.parametrize("infinite", ["metric", "both"])
def test_a_metric_that_is_not_finite_is_named(infinite):
    class Undefined(ddl.Classification):
        def per_example(self, features, training):
            output = super().per_example(features, training)
            none = tf.zeros_like(output.loss) / 0.0
            loss = output.loss + none if infinite == "both" else output.loss
            return ddl.PerExample(loss, {**output.metrics, "ratio": none})

    data = {"image": np.ones((8, 3), "f4"), "label": np.zeros(8, "i4")}
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    trainer = ddl.Trainer(Undefined(model), "sgd", data, global_batch_size=4)
    what = "the metric 'ratio'" if infinite == "metric" else "the loss"
    with pytest.raises(TrainingDiverged, match=f"at step 1: {what} is not finite from batch 0 on"):
        trainer.train(1)


class SecondOfTwo(Workers):
    """Stands for worker 1 of two; on the first one all gradients are finite."""

    def __init__(self, strategy):
        super().__init__(strategy)
        self.number, self.index = 2, 1

    def any(self, value):
        return value

    def gather(self, values):
        return np.stack([np.ones_like(values, np.float64), values])


def test_an_overflow_on_another_worker_is_named(monkeypatch):
    monkeypatch.setattr("ddl.training.divergence.Workers", SecondOfTwo)
    trainer = overflowing_trainer(
        make_strategy("mirrored", 2),
        lambda batch: 1,
        batch_normalization=False,
        max_skipped_updates=3,
    )
    with pytest.raises(TrainingDiverged, match=r"logits/bias on replica 3 of worker 1\."):
        trainer.train(1)


def test_where_one_worker_cannot_tell_none_computes(monkeypatch):
    """Another one would wait for it where layers communicate."""

    class OtherCannot(SecondOfTwo):
        def any(self, value):
            return True

    monkeypatch.setattr("ddl.training.divergence.Workers", OtherCannot)
    trainer = overflowing_trainer(
        make_strategy("mirrored", 2),
        lambda batch: 1,
        batch_normalization=False,
        max_skipped_updates=3,
    )
    with pytest.raises(TrainingDiverged, match="The origin could not be located"):
        trainer.train(1)
