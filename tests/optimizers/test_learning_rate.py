"""Scaling rules, warm-up, schedules against closed forms, and what counts as an update."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import schedules

import ddl
from ddl.errors import ConfigError
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.schedules import OneCycle, ReciprocalSquareRoot, StepDecay
from tests.conftest import for_each_kind_on_two, save

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
    "piecewise": (
        schedules.PiecewiseConstantDecay([50, 90], [0.3, 0.2, 0.01]),
        lambda s: 0.3 if s <= 50 else 0.2 if s <= 90 else 0.01,
    ),
    "polynomial": (
        schedules.PolynomialDecay(0.3, 333, 0.001, power=2.0),
        lambda s: 0.299 * (1 - min(s, 333) / 333) ** 2 + 0.001,
    ),
    "exponential": (schedules.ExponentialDecay(0.3, 7, 0.91), lambda s: 0.3 * 0.91 ** (s / 7)),
    "inverse time": (
        schedules.InverseTimeDecay(0.3, 11, 0.7),
        lambda s: 0.3 / (1 + 0.7 * s / 11),
    ),
    "cosine": (
        schedules.CosineDecay(0.3, 333, alpha=0.01),
        lambda s: 0.3 * (0.99 * (1 + math.cos(math.pi * min(s, 333) / 333)) / 2 + 0.01),
    ),
    "reciprocal square root": (
        ReciprocalSquareRoot(0.3, 50),
        lambda s: 0.3 * math.sqrt(50 / (50 + s)),
    ),
    "one cycle": (
        OneCycle(0.3, 300, rise=0.3, initial_share=0.04, final_share=1e-4),
        lambda s: one_cycle(s / 300),
    ),
    "one's own": (OwnSchedule(), lambda s: 0.5 / (s + 1)),
}


def one_cycle(x):
    def half_cosine(done):
        return (1 - math.cos(math.pi * done)) / 2

    if x < 0.3:
        return 0.3 * (0.04 + 0.96 * half_cosine(x / 0.3))
    return 0.3 * (1 + (1e-4 - 1) * half_cosine((min(x, 1) - 0.3) / 0.7))


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


@pytest.mark.parametrize("begins", ["after_warmup", "at_start"])
@pytest.mark.parametrize("name", ["constant", "step", "cosine", "one's own"])
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


def test_steps_above_2_to_the_24_are_told_apart():
    far = 2**31 + 1
    rate = LearningRate(schedules.PolynomialDecay(1.0, 2**32, 0.0))
    assert float(rate(tf.constant(far, tf.int64))) == pytest.approx(1 - far / 2**32, rel=1e-15)
    rate = LearningRate(StepDecay(1.0, [far]))
    assert [float(rate(tf.constant(far + n, tf.int64))) for n in (-1, 0)] == [1.0, 0.1]


@pytest.mark.parametrize("name", [name for name in CLOSED_FORMS if name != "one's own"])
def test_schedules_are_saved_and_read(name):
    rate = LearningRate(CLOSED_FORMS[name][0], warmup_steps=9, schedule_begins="at_start")
    optimizer = keras.optimizers.SGD(rate)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))._learning_rate
    assert again is not rate
    assert again.get_config() == rate.get_config()
    for step in (0, 5, 30, 100):
        assert float(again(step)) == float(rate(step))


@pytest.mark.parametrize(
    ("rule", "expected"), [("linear", 4.0), ("square_root", 2.0), ("none", 1.0)]
)
def test_rules(rule, expected):
    rate = LearningRate(0.1, scaling=rule, base_batch_size=64, global_batch_size=256)
    assert float(rate(0)) == pytest.approx(0.1 * expected, rel=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": -0.1}, "learning rate .* must be greater than 0, got -0.1"),
        ({"schedule": 0.0}, "learning rate .* must be greater than 0, got 0"),
        ({"schedule": math.nan}, "learning rate .* must be greater than 0, got nan"),
        ({"scaling": "cubic"}, "must be 'linear', 'square_root' or 'none', got 'cubic'"),
        ({"scaling": "linear"}, "needs BASE_BATCH_SIZE .* got None. Set it"),
        (
            {"scaling": "linear", "base_batch_size": 64},
            "needs GLOBAL_BATCH_SIZE .* got None",
        ),
        ({"base_batch_size": 64}, r"base batch size \(64\) needs a scaling rule"),
        (
            {"scaling": "linear", "base_batch_size": 0, "global_batch_size": 8},
            "base_batch_size.* greater than 0, got 0",
        ),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0, got -1"),
        (
            {"warmup_steps": 5, "warmup_start": -0.5},
            "warmup_start, .* must be at least 0, got -0.5",
        ),
        ({"schedule_begins": "later"}, "must be 'after_warmup' or 'at_start', got 'later'"),
        (
            {"schedule": StepDecay(0.1, [30]), "warmup_steps": 5},
            r"steps \[30\] of StepDecay could .* warm-up \(5 updates\)",
        ),
        (
            {"schedule": schedules.PiecewiseConstantDecay([3], [1.0, 0.1]), "warmup_steps": 5},
            "schedule_begins to 'at_start' or",
        ),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LearningRate(**{"schedule": 0.1} | arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepDecay(0.1, [3, 2]), "StepDecay.boundaries must increase strictly"),
        (lambda: StepDecay(0.0, [3]), "initial_learning_rate must be greater than 0, got 0.0"),
        (lambda: ReciprocalSquareRoot(0.1, 0), "timescale must be greater than 0, got 0"),
        (lambda: OneCycle(0.1, 9, rise=1.0), "OneCycle.rise must be between 0 and 1, .* got 1.0"),
    ],
)
def test_schedules_refuse(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def constant_gradient(optimizer, strategy, **arguments):
    """A trainer whose gradient is 1 at every update, and its one weight."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )

        class Task:
            def __init__(self):
                self.model = model

            def per_example(self, features, training):
                return ddl.PerExample(loss=model(features["x"], training=training)[:, 0])

        data = {"x": np.ones((64, 1), keras.config.floatx())}
        trainer = ddl.Trainer(Task(), optimizer(), data, global_batch_size=8, **arguments)
    return trainer, model.trainable_variables[0]


def rates_of(trainer, updates):
    rates = []
    for _ in range(updates):
        trainer.train(1)
        rates.append(trainer.learning_rates["learning_rate"])
    return rates


def warm_cycle():
    return keras.optimizers.SGD(LearningRate(OneCycle(0.3, 12), warmup_steps=3))


CYCLE = [float(LearningRate(OneCycle(0.3, 12), warmup_steps=3)(step)) for step in range(10)]


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


@for_each_kind_on_two
def test_k_updates_at_a_rate_are_one_at_k_times_it(strategy, float64):
    """Of a constant gradient: what linear scaling rests on."""

    def sgd(batch):
        rate = {"scaling": "linear", "base_batch_size": 8, "global_batch_size": batch}
        return lambda: keras.optimizers.SGD(LearningRate(0.01, **rate))

    small, weight = constant_gradient(sgd(8), strategy)
    small.train(16)
    large, weight_of_large = constant_gradient(sgd(32), strategy)
    assert rates_of(large, 4) == [0.04] * 4
    assert float(weight[0, 0]) == pytest.approx(-0.16, rel=1e-12)
    assert float(weight_of_large[0, 0]) == pytest.approx(-0.16, rel=1e-12)


@for_each_kind_on_two
def test_microbatches_do_not_count(strategy, float64):
    trainer, weight = constant_gradient(warm_cycle, strategy, accumulation_steps=2)
    assert rates_of(trainer, 10) == CYCLE
    assert float(weight[0, 0]) == pytest.approx(-sum(CYCLE), rel=1e-12)


@for_each_kind_on_two
def test_skipped_updates_do_not_count(strategy):
    keras.config.set_dtype_policy("mixed_float16")
    scale = ddl.LossScale(initial=2.0**19)  # too large for float16 at first
    trainer, weight = constant_gradient(warm_cycle, strategy, loss_scale=scale)
    assert rates_of(trainer, 10) == CYCLE
    assert trainer.skipped_updates > 0
    assert float(weight[0, 0]) == pytest.approx(-sum(CYCLE), rel=1e-6)


@for_each_kind_on_two
def test_a_run_that_goes_on_counts_on(strategy, float64, tmp_path):
    trainer, _ = constant_gradient(warm_cycle, strategy)
    trainer.train(4)
    save(tmp_path, trainer)
    trainer, weight = constant_gradient(warm_cycle, strategy)
    ddl.Checkpoints(tmp_path, trainer).restore_latest()
    assert rates_of(trainer, 6) == CYCLE[4:]
    assert float(weight[0, 0]) == pytest.approx(-sum(CYCLE), rel=1e-12)
