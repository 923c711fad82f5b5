"""Memory of a trainer whose optimizer's state is in shares, and optimizers that are refused."""

import keras
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.sharding.trainers import make, slot_bytes


def test_each_replica_holds_its_share_of_the_slots():
    set_precision("float32")
    replicas = 4

    def model():
        return keras.Sequential([keras.Input([7]), keras.layers.Dense(401), keras.layers.Dense(5)])

    of_whole = slot_bytes(make(make_strategy("one_device", 1), False, model=model))[0]
    trainer = make(make_strategy("mirrored", replicas), True, model=model)
    assert len(slot_bytes(trainer)) == replicas
    assert max(slot_bytes(trainer)) <= of_whole * (1 / replicas + 0.02)


class Own(keras.optimizers.SGD):
    """An optimizer of which nothing is known."""


@pytest.mark.parametrize(
    "optimizer",
    [
        ddl.optimizers.LAMB,
        ddl.optimizers.LARS,
        keras.optimizers.Lamb,
        keras.optimizers.Adafactor,
        keras.optimizers.Muon,
        Own,
    ],
)
def test_optimizers_that_are_not_known_to_compute_by_entry_are_refused(optimizer):
    name = optimizer.__name__
    with pytest.raises(ConfigError, match=f"elementwise optimizers.*got {name} .*Leave"):
        make(make_strategy("mirrored", 2), True, optimizer)
