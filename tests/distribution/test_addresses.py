"""Who answers at an address, and who may reach the servers of a cluster on one machine."""

import errno
import json
import socket
from types import SimpleNamespace

import pytest
import tensorflow as tf

from ddl.distribution import addresses, parameter_servers
from ddl.distribution.addresses import ask, close_to_other_machines, is_loopback
from ddl.distribution.cluster import ClusterRole, ClusterTimeouts
from tests.distribution.whole_clusters import free_addresses


def test_a_stopped_process_is_silent():
    """The kernel takes the connection; nobody greets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask(f"127.0.0.1:{server.getsockname()[1]}", 0.1) == "is silent"


def test_a_dead_one_refuses():
    assert ask(*free_addresses(1), 5.0) == "refuses"


def test_a_server_of_tensorflow_greets():
    server = tf.distribute.Server.create_local_server()
    assert ask(server.target.removeprefix("grpc://"), 5.0) == "greets"


def test_an_unknown_host_is_unreachable():
    assert ask("no-such-host.invalid:1", 1.0) == "is unreachable"


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


def test_hosts_of_this_machine():
    here = ["127.0.0.1", "127.0.0.2", "localhost", "[::1]", "10.0.0.1", "node1", "0.0.0.0"]
    assert [is_loopback(f"{host}:1") for host in here] == [True] * 4 + [False] * 3


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
    numbers = []
    for _ in range(2):
        found = addresses._listening_at(port)
        numbers.append([one.fileno() for one in found])
        for one in found:
            one.close()
        close_to_other_machines({"worker": [f"localhost:{port}"]}, f"localhost:{port}")
    assert numbers[0] == numbers[1] != []


def test_a_server_that_stays_open_is_reported(monkeypatch, capsys):
    def refuses(port):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(addresses, "_listening_at", refuses)
    close_to_other_machines({"worker": ["127.0.0.1:7"]}, "127.0.0.1:7")
    report = capsys.readouterr().err
    assert "Other machines can connect to port 7" in report
    assert "Operation not permitted" in report


def test_a_parameter_server_is_bound_as_it_starts(monkeypatch, on_all_interfaces):
    own, chief = free_addresses(2)

    def start(*arguments, **options):
        return on_all_interfaces(int(own.partition(":")[2]))

    monkeypatch.setattr(parameter_servers.tf.distribute, "Server", start)
    role = ClusterRole({"chief": [chief], "ps": [own]}, "ps", 0)
    server = parameter_servers.start_server(role)
    assert device_of(server) == b"lo"


def test_the_chief_of_parameter_servers_is_bound_as_it_connects(monkeypatch, on_all_interfaces):
    """TensorFlow starts its server within the constructor of the strategy."""
    chief, *others = free_addresses(3)
    cluster = {"chief": [chief], "ps": others[:1], "worker": others[1:]}
    servers = []

    def connects(resolver):
        servers.append(on_all_interfaces(int(chief.partition(":")[2])))
        return SimpleNamespace(num_replicas_in_sync=1)

    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setattr(parameter_servers, "_wait_for", lambda *where: None)
    monkeypatch.setattr(parameter_servers.tf.distribute, "ParameterServerStrategy", connects)
    parameter_servers.build_parameter_server_strategy(ClusterTimeouts())
    assert [device_of(server) for server in servers] == [b"lo"]
