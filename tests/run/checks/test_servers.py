from types import SimpleNamespace

import pytest
import tensorflow as tf

from ddl.run.checks.servers import bytes_of_servers, notes_on, unevenly_held

MB = 2**20


def variable(name, megabytes, server):
    device = f"/job:ps/replica:0/task:{server}/device:CPU:0"
    shape = tf.TensorShape([megabytes * MB // 4])
    return SimpleNamespace(path=name, name=name, device=device, shape=shape, dtype=tf.float32)


@pytest.mark.parametrize(
    ("sizes", "servers", "noted"),
    [
        ({"table": 300, "rest": 10}, 2, ["table"]),
        ({"part_0": 150, "part_1": 150, "rest": 10}, 2, []),
        ({"table": 300, "rest": 10}, 1, []),  # there is nothing to share out
        ({"table": 30, "rest": 1}, 2, []),  # too small to matter
    ],
)
def test_notes_a_variable_that_exceeds_a_servers_share(sizes, servers, noted):
    variables = [variable(name, mb, n % servers) for n, (name, mb) in enumerate(sizes.items())]
    notes = notes_on(variables, servers)
    assert len(notes) == len(noted)
    for note, name in zip(notes, noted, strict=True):
        assert f"Parameter server 0 holds the whole variable {name}, 315 MB" in note
        assert "share of all variables, 163 MB. Make a large table" in note


def test_without_servers_nothing_is_said():
    trainer = SimpleNamespace(strategy=tf.distribute.OneDeviceStrategy("CPU:0"))
    assert bytes_of_servers(trainer) == {}
    assert unevenly_held(trainer) == []
