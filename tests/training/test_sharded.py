"""Memory of a trainer whose optimizer's state is in shares, and optimizers that are refused."""

import keras
import pytest

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.step.sharding.trainers import make, slot_bytes


def test_each_replica_holds_its_share_of_the_slots():
    whole = max(slot_bytes(make(make_strategy("one_device", 1), False)))
    of_replicas = slot_bytes(make(make_strategy("mirrored", 4), True))
    assert len(of_replicas) == 4
    assert max(of_replicas) <= 0.27 * whole  # the weights have odd sizes


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
