"""Several updates in one piece that XLA compiles, as on GPUs, beside one after the other."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from ddl.step.compiled import Compiler
from ddl.training.loop import repeated
from tests.conftest import make_strategy
from tests.training.parity_cases import UNEVEN, WEIGHED, Case, make_trainer, mlp
from tests.training.test_trainer import all_copies, overflowing_trainer

pytestmark = pytest.mark.usefixtures("gpu_path")


@pytest.fixture
def pieces(monkeypatch):
    """What each call of a compiler that compiled traced, by the name of the function."""
    traced = []
    call = Compiler.__call__

    def noted(self, function):
        if self.is_on:
            traced.append(function.__qualname__)
        return call(self, function)

    monkeypatch.setattr(Compiler, "__call__", noted)
    return traced


def in_pieces(traced):
    return any("_several_at_once" in name for name in traced)


CASE = Case(
    functools.partial(mlp, dropout=0.3),
    lambda: keras.optimizers.Adam(0.01),
    WEIGHED,
    {"clip_norm": 0.05},
)


def results(jit_compile, steps=(7, 9, 3)):
    strategy = make_strategy("one_device", 1)
    trainer = make_trainer(CASE, strategy, "float64", jit_compile=jit_compile)
    losses = [trainer.train(number)["loss"] for number in steps]
    assert (trainer.step, trainer.trace_count) == (sum(steps), 1)
    return losses, all_copies(trainer)


@functools.cache
def one_by_one():
    return results("off")


@pytest.mark.parametrize("at_once", [3, 32])
def test_the_same_as_one_by_one(at_once, pieces, monkeypatch):
    """With epochs of five batches, so that pieces end at the ends of epochs and of loops."""
    monkeypatch.setattr(repeated, "_AT_ONCE", at_once)
    losses, copies = results("on")
    assert in_pieces(pieces)
    expected_losses, expected = one_by_one()
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    for one, other in zip(copies, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_ends_at_the_update_that_is_one_skip_too_many(pieces):
    """Batches 1, 3 and 4 overflow; the batches after them in the piece are not consumed."""
    bad = tf.constant([-1, 0, -1, 0, 0, -1, -1, -1])
    trainer = overflowing_trainer(
        make_strategy("one_device", 1),
        lambda batch: bad[batch],
        batch_normalization=False,
        max_skipped_updates=2,
        jit_compile="on",
    )
    state = trainer._runner.loop.run(trainer.state, 6)
    assert in_pieces(pieces)
    assert (int(state.step), int(state.batches), int(state.skipped_in_a_row)) == (2, 5, 2)
    assert float(state.loss_scale) == 128.0


def test_stops_between_two_pieces(monkeypatch):
    monkeypatch.setattr(repeated, "_AT_ONCE", 2)
    trainer = make_trainer(
        Case(mlp, lambda: keras.optimizers.SGD(0.05), UNEVEN),
        make_strategy("one_device", 1),
        "float32",
        jit_compile="on",
    )
    reads = iter([False, True])  # before each piece
    of_tf = lambda: tf.py_function(lambda: next(reads, True), [], tf.bool)  # noqa: E731
    monkeypatch.setattr(trainer._runner.loop._repeated._stop, "ends_loop", of_tf)
    assert int(trainer._runner.loop.run(trainer.state, 100).step) == 2


def test_updates_of_rows_stay_apart(pieces):
    """XLA cannot merge rows of a sparse gradient; the loop starts each update on its own."""

    def trained(jit_compile):
        set_precision("float64")
        keras.utils.set_random_seed(0)
        words = keras.Input((3,), dtype="int64")
        x = keras.layers.Embedding(1000, 2)(words)
        model = keras.Model(words, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
        generator = np.random.default_rng(0)
        data = generator.integers(0, 1000, (40, 3)), generator.integers(0, 2, 40)
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.Adagrad(0.1),
            data,
            global_batch_size=8,
            jit_compile=jit_compile,
        )
        trainer.train(6)
        assert trainer._parts.update.is_whole is False
        return trainer.model.get_weights()

    ours = trained("on")
    assert in_pieces(pieces)  # was tried
    for one, other in zip(ours, trained("off"), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
