"""Asking a process whether it is there."""

import socket

import pytest
from ddl.distribution.grpc_probe import ask


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


def test_a_stopped_process_is_silent(listening):
    """The kernel takes the connection; nobody greets."""
    assert ask(listening[1], 0.1) == "is silent"


def test_a_dead_one_refuses():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert ask(address, 5.0) == "refuses"


def test_a_server_of_tensorflow_greets():
    import tensorflow as tf

    server = tf.distribute.Server.create_local_server()
    assert ask(server.target.removeprefix("grpc://"), 5.0) == "greets"


def test_an_unknown_host_is_unreachable():
    assert ask("no-such-host.invalid:1", 1.0) == "is unreachable"
