"""Who answers at an address, and who may reach the servers of a cluster on one machine."""

import socket

import pytest

from ddl.distribution.addresses import close_to_other_machines


def device_of(one):
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


@pytest.fixture
def on_all_interfaces():
    """A function that returns a server which listens as TensorFlow's do."""
    servers = []

    def listen(port=0):
        servers.append(socket.create_server(("0.0.0.0", port)))
        return servers[-1]

    yield listen
    for server in servers:
        server.close()


def test_a_server_of_a_cluster_on_one_machine_is_bound_to_the_loopback_device(on_all_interfaces):
    server, other = on_all_interfaces(), on_all_interfaces()
    port = server.getsockname()[1]
    own = f"127.0.0.1:{port}"
    close_to_other_machines({"worker": [own, "10.0.0.1:1"]}, own)
    assert device_of(server) == b""
    close_to_other_machines({"worker": [own, "localhost:1"]}, own)
    assert device_of(server) == b"lo"
    assert device_of(other) == b""
    socket.create_connection(("127.0.0.1", port)).close()  # from this machine as before
