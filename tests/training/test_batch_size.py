import pytest

from ddl.errors import ConfigError
from ddl.training.batch_size import global_batch_size
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
        ({}, "neither of them"),
        ({"total": 8, "per_replica": 8}, "both of them"),
        ({"total": 0}, "batch size is 0"),
        ({"per_replica": -4}, "batch size is -4"),
    ],
)
def test_bad_batch_sizes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        global_batch_size(**arguments)
