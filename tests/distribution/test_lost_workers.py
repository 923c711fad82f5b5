"""Workers without a launcher, of which one dies or stalls: the others end with 77 and name it."""

import pytest

from ddl.distribution.cluster import ClusterTimeouts
from tests.distribution.whole_clusters import (
    addresses,
    arguments,
    assert_none_left,
    finish_all,
    start_worker,
)

LONG = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000", "CHECKPOINT_EVERY = 20"]


@pytest.mark.processes
def test_a_worker_that_never_comes(tmp_path):
    model_dir = tmp_path / "run"
    hosts = addresses(3)
    flags = [*arguments(model_dir, config="digits_mlp.gin"), "--worker_timeout=3"]
    ended = finish_all([start_worker(index, hosts, *flags) for index in range(2)])
    for status, output in ended:
        assert status == 77, output
    assert f"Worker 2 at {hosts[2]} did not join within 3 s" in ended[0][1]
    assert not model_dir.exists()
    assert_none_left(model_dir)


def test_limits_are_those_that_are_documented():
    assert ClusterTimeouts() == ClusterTimeouts(join=60.0, peer=30.0, stall=300.0)
