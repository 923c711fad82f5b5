import pytest

from ddl.errors import ConfigError
from ddl.training.checks import global_batch_size
from tests.conftest import make_strategy


def test_global_batch_size():
    assert global_batch_size(total=64) == 64
    with make_strategy("mirrored", 4).scope():
        assert global_batch_size(total=64) == 64
        assert global_batch_size(per_replica=16) == 64
    with make_strategy("one_device", 1).scope():
        assert global_batch_size(per_replica=16) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of .* got None and None"),
        ({"total": 8, "per_replica": 8}, "Exactly one of .* got 8 and 8"),
        ({"total": 0}, "^GLOBAL_BATCH_SIZE must be at least 1, got 0"),
        ({"per_replica": -4}, "PER_REPLICA_BATCH_SIZE must be at least 1, got -4"),
    ],
)
def test_bad_batch_sizes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        global_batch_size(**arguments)
