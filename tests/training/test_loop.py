"""The training loop: tables of rows, and several updates in one piece that XLA compiles."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline, Source
from ddl.data.batch import Batch
from ddl.random import batch_counter
from ddl.step.compiled import Compiler
from ddl.step.replicas import distributed_iterator
from ddl.training import loop
from ddl.training.loop import RowTables
from tests.conftest import make_strategy
from tests.training.overflowing import overflowing
from tests.training.parity_cases import WEIGHED, Case, make_trainer, mlp
from tests.training.test_trainer import all_copies


def pipeline_of(num_examples=22, **kwargs):
    return BatchPipeline(Source({"x": np.arange(num_examples)}), 8, seed=3, **kwargs)


CASES = [("one_device", 1, 1600, tf.int64), ("mirrored", 2, 22, tf.int32)]  # full batches, or not


@pytest.mark.parametrize(("kind", "replicas", "num_examples", "place_dtype"), CASES)
def test_tables_hold_the_iterators_rows(kind, replicas, num_examples, place_dtype, monkeypatch):
    """Across three tables, and after a jump to an earlier and a later update."""
    monkeypatch.setattr(loop, "_MOST", 16)
    strategy = make_strategy(kind, replicas)
    pipeline = pipeline_of(num_examples, microbatches=2)
    pipeline.batches_per_update = 2
    tables = RowTables({"": pipeline}, strategy)
    assert tables.length == 16

    def microbatches(batch):
        return [pipeline.examples(batch, m, n)["x"] for n in (0, 1) for m in (0, 1)]

    @tf.function(autograph=False)
    def examples(batch):
        found = strategy.run(microbatches, (batch,))
        return [strategy.experimental_local_results(each) for each in found]

    arrays = pipeline.resident_arrays(strategy)
    counter = batch_counter(tf.zeros([], tf.int64))
    for begin, end in [(5, 40), (0, 3), (100, 102)]:
        iterator = distributed_iterator(pipeline, strategy, begin)
        for update in range(begin, end):
            first, table = tables.at(update)
            assert ("weight" in table[""]) == (num_examples == 22)
            assert int(first) <= update < int(first) + 16
            place = tf.cast(update - first, place_dtype)
            found = examples(Batch(table[""], arrays, counter, place))
            np.testing.assert_array_equal(found, examples(Batch(next(iterator), arrays, counter)))


@pytest.fixture
def pieces(monkeypatch):
    """What each call of a compiler that compiled traced, by the name of the function."""
    traced = []
    call = Compiler.__call__

    def noted(self, function):
        if self.is_on:
            traced.append(getattr(function, "func", function).__qualname__)
        return call(self, function)

    monkeypatch.setattr(Compiler, "__call__", noted)
    return traced


def in_pieces(traced):
    return any("several" in name for name in traced)


CASE = Case(
    functools.partial(mlp, dropout=0.3),
    lambda: keras.optimizers.Adam(0.01),
    WEIGHED,
    {"clip_norm": 0.05},
)


STEPS = (7, 9, 3)


def trained(strategy, case, jit_compile):
    trainer = make_trainer(case, strategy, "float64", jit_compile=jit_compile)
    return trainer, [trainer.train(number)["loss"] for number in STEPS]


@functools.cache
def one_by_one():
    trainer, losses = trained(make_strategy("one_device", 1), CASE, "off")
    return losses, all_copies(trainer)


def assert_as_one_by_one(trainer, losses):
    expected_losses, expected = one_by_one()
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    for copies, (one,) in zip(all_copies(trainer), expected, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, one, rtol=0, atol=1e-10)


def test_two_compiled_replicas_are_the_same():
    """With accumulation, padding and weights: pieces lie between the collectives."""
    case = dataclasses.replace(CASE, arguments={"accumulation_steps": 2, "clip_norm": 0.05})
    assert_as_one_by_one(*trained(make_strategy("mirrored", 2), case, "on"))


@pytest.mark.usefixtures("gpu_path")
def test_the_same_as_one_by_one_and_stops_between_two_pieces(pieces, monkeypatch):
    """With epochs of five batches, so that pieces end at the ends of epochs and of loops."""
    monkeypatch.setattr(loop, "_AT_ONCE", 3)
    stops = [False]  # read before each piece; the last one stays
    read = lambda: stops.pop(0) if stops[1:] else stops[0]  # noqa: E731
    of_tf = lambda _: tf.py_function(read, [], tf.bool)  # noqa: E731
    monkeypatch.setattr(loop.HostScalar, "read", of_tf)
    trainer, losses = trained(make_strategy("one_device", 1), CASE, "on")
    assert in_pieces(pieces)
    assert_as_one_by_one(trainer, losses)
    stops += [True]
    assert int(trainer._runner.loop.run(trainer.state, 100).step) == sum(STEPS) + 3


@pytest.mark.usefixtures("gpu_path")
def test_ends_at_the_update_that_is_one_skip_too_many(pieces):
    """Batches 1, 3 and 4 overflow; the batches after them in the piece are not consumed."""
    bad = tf.constant([-1, 0, -1, 0, 0, -1, -1, -1])
    arguments = {"loss_scale": ddl.LossScale(1024.0), "max_skipped_updates": 2}
    case = Case(lambda: overflowing(mlp(), lambda batch: bad[batch]), arguments=arguments)
    strategy = make_strategy("one_device", 1)
    trainer = make_trainer(case, strategy, "mixed_float16", jit_compile="on")
    state = trainer._runner.loop.run(trainer.state, 6)
    assert in_pieces(pieces)
    assert (int(state.step), int(state.batches), int(state.skipped_in_a_row)) == (2, 5, 2)
    assert float(state.loss_scale) == 128.0
