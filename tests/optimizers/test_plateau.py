"""The rule of ReduceOnPlateau, and that a resumed run continues it."""

import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import ddl
from ddl.optimizers.plateau import ReduceOnPlateau, plateau_of
from tests.conftest import make_strategy, save
from tests.optimizers.test_learning_rate import constant_gradient


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
