import pytest

from ddl.distribution.cluster import ClusterTimeouts
from ddl.errors import ConfigError


@pytest.mark.parametrize("name", ["join", "peer", "stall"])
def test_timeouts_are_more_than_zero(name):
    with pytest.raises(ConfigError, match="--worker_timeout .* than 0 seconds, got .* Leave"):
        ClusterTimeouts(**{name: 0.0})
