"""The rule of ReduceOnPlateau, and that a resumed run continues it."""

import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.plateau import ReduceOnPlateau, plateau_of, plateaus_of
from tests.conftest import for_each_kind_on_two, make_strategy, save
from tests.optimizers.test_learning_rate import constant_gradient, rates_of


def rule(**arguments):
    return ReduceOnPlateau(**{"schedule": 1.0, "factor": 0.5, "patience": 2} | arguments)


def reductions(plateau, values):
    return [n for n, value in enumerate(values, start=1) if plateau.observe(2 * n, value)]


def test_the_rule_is_that_of_keras():
    random = np.random.default_rng(0)
    for patience, min_delta in itertools.product(range(1, 4), [0.0, 0.1]):
        arguments = {"factor": 0.5, "patience": patience, "min_delta": min_delta}
        callback = keras.callbacks.ReduceLROnPlateau("loss", mode="min", **arguments)
        optimizer = SimpleNamespace(learning_rate=1.0)
        callback.set_model(SimpleNamespace(optimizer=optimizer))
        callback.on_train_begin()
        ours = ReduceOnPlateau(1.0, **arguments)
        for step, value in enumerate(random.integers(0, 6, 16) / 5, start=1):
            ours.observe(step, value)
            callback.on_epoch_end(step, {"loss": value})
            assert float(ours(step)) == pytest.approx(optimizer.learning_rate), (arguments, step)


def test_higher_is_better_for_an_accuracy():
    assert reductions(rule(metric="accuracy"), [0.5, 0.6, 0.5, 0.55]) == [4]
    assert reductions(rule(metric="accuracy", mode="min"), [0.5, 0.6, 0.5]) == [3]
    assert reductions(rule(metric="accuracy"), [float("nan"), 0.6, 0.5, 0.7]) == []


def test_it_reduces_any_schedule():
    cosine = keras.optimizers.schedules.CosineDecay(0.3, 40)
    for inner in (cosine, LearningRate(cosine, warmup_steps=4)):
        plateau = rule(schedule=inner)
        assert reductions(plateau, [1.0] * 3) == [3]
        in_float64 = inner if isinstance(inner, LearningRate) else LearningRate(inner)
        expected = [float(in_float64(step)) * (0.5 if step >= 6 else 1) for step in range(20)]
        np.testing.assert_allclose([float(plateau(step)) for step in range(20)], expected, 1e-12)


def test_it_is_saved_and_read_as_it_began():
    plateau = rule(schedule=LearningRate(0.3, warmup_steps=4), metric="accuracy")
    reductions(plateau, [1.0] * 5)
    serialized = keras.optimizers.serialize(keras.optimizers.SGD(plateau))
    again = plateau_of(keras.optimizers.deserialize(serialized))
    assert again.get_config() == plateau.get_config()
    assert float(again(9)) == 0.3


@for_each_kind_on_two
def test_a_traced_loop_follows(strategy):
    trainer, weight = constant_gradient(lambda: keras.optimizers.SGD(rule()), strategy)
    rates = rates_of(trainer, 6)
    assert reductions(plateau_of(trainer.optimizer), [1.0] * 3) == [3]
    rates += rates_of(trainer, 2)
    assert rates == [1.0] * 6 + [0.5] * 2
    assert float(weight[0, 0]) == -7.0
    assert trainer.trace_count == 1


def test_a_resumed_run_continues_it(tmp_path):
    values = [1.0, 0.5, 0.6, 0.7, 0.8, 0.4, 0.4, 0.4, 0.4]
    whole = rule()
    expected = reductions(whole, values)
    for stop in range(1, len(values)):
        strategy = make_strategy("one_device", 1)
        first, _ = constant_gradient(lambda: keras.optimizers.SGD(rule()), strategy)
        found = reductions(plateau_of(first.optimizer), values[:stop])
        save(tmp_path / str(stop), first)
        second, _ = constant_gradient(lambda: keras.optimizers.SGD(rule()), strategy)
        ddl.Checkpoints(tmp_path / str(stop), second).restore_latest()
        plateau = plateau_of(second.optimizer)
        later = [
            n for n in range(stop + 1, len(values) + 1) if plateau.observe(2 * n, values[n - 1])
        ]
        assert found + later == expected
        assert [float(plateau(s)) for s in (8, 18)] == [float(whole(s)) for s in (8, 18)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, "factor must be between 0 and 1, both excluded, got 1.0"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"min_delta": -1.0}, "min_delta must be at least 0, got -1.0"),
        ({"schedule": -1.0}, "learning rate .* must be greater than 0, got -1"),
        ({"mode": "lowest"}, "must be 'max' or 'min', got 'lowest'"),
        ({"metric": "far_off"}, "Set ReduceOnPlateau.mode = 'max' or 'min'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        rule(**arguments)


def test_it_stands_outermost_and_alone():
    plateau = rule()
    with pytest.raises(ConfigError, match="ReduceOnPlateau must wrap LearningRate"):
        LearningRate(plateau)
    both = {"a": keras.optimizers.SGD(plateau), "b": keras.optimizers.SGD(plateau)}
    with pytest.raises(ConfigError, match="a, b share a ReduceOnPlateau"):
        plateaus_of(both)
