"""Scaling rules, warm-up, schedules against closed forms, and what counts as an update."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import schedules

from ddl.errors import ConfigError
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.schedules import StepDecay

STEPS = 400


class OwnSchedule(schedules.LearningRateSchedule):
    """As somebody writes one, in float32 and without a config."""

    def __call__(self, step):
        return 0.5 / (tf.cast(step, tf.float32) + 1.0)


CLOSED_FORMS = {
    "constant": (0.3, lambda s: 0.3),
    "step": (
        StepDecay(0.3, [30, 60, 300], 0.1),
        lambda s: 0.3 * 0.1 ** sum(s >= b for b in (30, 60, 300)),
    ),
    "cosine": (
        schedules.CosineDecay(0.3, 333, alpha=0.01),
        lambda s: 0.3 * (0.99 * (1 + math.cos(math.pi * min(s, 333) / 333)) / 2 + 0.01),
    ),
    "one's own": (OwnSchedule(), lambda s: 0.5 / (s + 1)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_schedules_are_their_closed_forms(name):
    schedule, closed_form = CLOSED_FORMS[name]
    rate = LearningRate(
        schedule, scaling="linear", base_batch_size=3, global_batch_size=7, schedule_begins=None
    )
    of_step = tf.function(lambda step: tf.cast(rate(step), tf.float32), autograph=False)
    ours = [float(of_step(tf.constant(step, tf.int64))) for step in range(STEPS)]
    expected = [7 / 3 * closed_form(step) for step in range(STEPS)]
    np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=0)


def test_a_saved_optimizer_has_its_rate_again():
    rate = LearningRate(schedules.CosineDecay(0.3, 9), warmup_steps=3)
    saved = keras.saving.serialize_keras_object(keras.optimizers.SGD(rate))
    again = keras.saving.deserialize_keras_object(saved)._learning_rate
    assert [float(again(step)) for step in (1, 7)] == [float(rate(step)) for step in (1, 7)]


@pytest.mark.parametrize("begins", ["after_warmup", "at_start"])
@pytest.mark.parametrize("name", ["step", "one's own"])
def test_warm_up_is_its_closed_form(name, begins):
    schedule, closed_form = CLOSED_FORMS[name]
    rate = LearningRate(
        schedule,
        scaling="square_root",
        base_batch_size=64,
        global_batch_size=256,
        warmup_steps=37,
        warmup_start=0.25,
        schedule_begins=begins,
    )
    shift = 37 if begins == "after_warmup" else 0
    for step in [*range(0, 100), *range(100, STEPS, 7), STEPS - 1]:
        expected = 2 * closed_form(max(step, 37) - shift)
        if step < 37:
            expected *= 0.25 + 0.75 * step / 37
        assert float(rate(step)) == pytest.approx(expected, rel=1e-7), step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": -0.1}, "learning rate .* must be greater than 0, got -0.1"),
        ({"scaling": "linear"}, "needs BASE_BATCH_SIZE .* got None. Set it"),
        (
            {"scaling": "linear", "base_batch_size": 64},
            "needs GLOBAL_BATCH_SIZE .* got None",
        ),
        ({"base_batch_size": 64}, r"base batch size \(64\) needs a scaling rule"),
        (
            {"schedule": StepDecay(0.1, [30]), "warmup_steps": 5},
            r"steps \[30\] of StepDecay could .* warm-up \(5 updates\)",
        ),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LearningRate(**{"schedule": 0.1} | arguments)
