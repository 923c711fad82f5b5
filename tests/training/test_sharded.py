"""Trainers whose optimizers' state is in shares, and trainers whose state is whole."""

import functools

import keras
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.sharding.trainers import (
    adamw,
    assert_close,
    figures,
    make,
    slot_bytes,
)


@functools.cache
def whole(optimizer, steps=5, **arguments):
    """The figures of a trainer with whole slots."""
    return figures(make(make_strategy("mirrored", 2), False, optimizer, **arguments), steps)


def test_compiled_updates_are_the_same():
    set_precision("float64")
    trainer = make(make_strategy("mirrored", 2), True, jit_compile="on", clip_norm=0.3)
    found = figures(trainer)
    assert trainer._update.compiler.is_on
    assert_close(found, whole(adamw, clip_norm=0.3))


def test_each_replica_holds_its_share_of_the_slots():
    set_precision("float32")
    replicas = 4

    def model():
        return keras.Sequential([keras.Input([7]), keras.layers.Dense(401), keras.layers.Dense(5)])

    of_whole = slot_bytes(make(make_strategy("one_device", 1), False, model=model))[0]
    trainer = make(make_strategy("mirrored", replicas), True, model=model)
    assert len(slot_bytes(trainer)) == replicas
    assert max(slot_bytes(trainer)) <= of_whole * (1 / replicas + 0.02)
    trainer.train(2, progress=False)
    assert max(slot_bytes(trainer)) <= of_whole * (1 / replicas + 0.02)
    # The stand-ins of the weights hold memory during an update alone.
    stand_ins = trainer.optimizer._trainable_variables
    copies = [c for v in stand_ins for c in trainer.strategy.experimental_local_results(v.value)]
    assert len(copies) == replicas * 4
    sizes = [tf.raw_ops.ReadVariableOp(resource=c.handle, dtype=c.dtype).shape for c in copies]
    assert all(size == [0] for size in sizes)


class Own(keras.optimizers.SGD):
    """An optimizer of which nothing is known."""


@pytest.mark.parametrize(
    "optimizer",
    [
        ddl.optimizers.LAMB,
        keras.optimizers.Muon,
        Own,
    ],
)
def test_optimizers_that_are_not_known_to_compute_by_entry_are_refused(optimizer):
    name = optimizer.__name__
    with pytest.raises(ConfigError, match=f"elementwise optimizers.*got {name} .*Leave"):
        make(make_strategy("mirrored", 2), True, optimizer)
