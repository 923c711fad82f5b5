"""Servers of a cluster on one machine, and who may reach them."""

import errno
import json
import socket
from types import SimpleNamespace

import pytest
from ddl.distribution.loopback import close_to_other_machines, is_on_this_machine, listening_sockets

from ddl.distribution import loopback, parameter_servers
from ddl.distribution.cluster import ClusterTimeouts
from tests.distribution.whole_clusters import addresses


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


@pytest.mark.parametrize(
    ("hosts", "here"),
    [
        (["127.0.0.1", "127.0.0.2", "localhost", "[::1]"], True),
        (["127.0.0.1", "10.0.0.1"], False),
        (["node1"], False),
        (["0.0.0.0"], False),
    ],
    ids=str,
)
def test_which_clusters_are_on_one_machine(hosts, here):
    assert is_on_this_machine({"worker": [f"{host}:{1}" for host in hosts]}) is here


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


def test_no_descriptor_is_left(on_all_interfaces):
    port = on_all_interfaces().getsockname()[1]
    first = listening_sockets(port)
    numbers = [one.fileno() for one in first]
    for one in first:
        one.close()
    close_to_other_machines({"worker": [f"localhost:{port}"]}, f"localhost:{port}")
    again = listening_sockets(port)
    assert [one.fileno() for one in again] == numbers
    for one in again:
        one.close()


def test_a_server_that_stays_open_is_reported(monkeypatch, capsys):
    def refuses(port):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(loopback, "listening_sockets", refuses)
    close_to_other_machines({"worker": ["127.0.0.1:7"]}, "127.0.0.1:7")
    report = capsys.readouterr().err
    assert "The server at port 7 accepts connections from other machines" in report
    assert "Operation not permitted" in report


def test_a_parameter_server_is_bound_as_it_starts(monkeypatch, on_all_interfaces):
    own, chief = addresses(2)

    def start(cluster, **options):
        return on_all_interfaces(int(own.partition(":")[2]))

    monkeypatch.setattr(parameter_servers.tf.distribute, "Server", start)
    server = parameter_servers.start_server({"chief": [chief], "ps": [own]}, "ps", 0)
    assert device_of(server) == b"lo"


def test_the_chief_of_parameter_servers_is_bound_as_it_connects(monkeypatch, on_all_interfaces):
    """TensorFlow starts its server within the constructor of the strategy."""
    chief, *others = addresses(3)
    cluster = {"chief": [chief], "ps": others[:1], "worker": others[1:]}
    servers = []

    def connects(resolver):
        servers.append(on_all_interfaces(int(chief.partition(":")[2])))
        return SimpleNamespace(num_replicas_in_sync=1)

    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setattr(parameter_servers, "_wait_for", lambda *where: None)
    monkeypatch.setattr(parameter_servers._Watch, "begin", lambda *peer: None)
    monkeypatch.setattr(parameter_servers.tf.distribute, "ParameterServerStrategy", connects)
    parameter_servers.build_parameter_server_strategy(ClusterTimeouts())
    assert [device_of(server) for server in servers] == [b"lo"]
