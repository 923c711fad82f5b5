import json
import os
import socket
import time

import pytest
from ddl.distribution.joining import wait_for_workers

from ddl.errors import AddressTaken, ConfigError, WorkerLost


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def config(ports, index, task="worker", chief=False):
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"chief": addresses[:1], "worker": addresses[1:]} if chief else {"worker": addresses}
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


def in_a_process_of_its_own(text, timeout) -> int:
    """Joins as another worker; the exit status."""
    child = os.fork()
    if child:
        return child
    os.environ["TF_CONFIG"] = text
    try:
        wait_for_workers(timeout)
    except WorkerLost:
        os._exit(77)
    os._exit(0)


def status(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("chief", [False, True])
def test_all_meet(monkeypatch, chief):
    ports = free_ports(3)
    tasks = [("worker", 1), ("worker", 2)] if not chief else [("worker", 0), ("worker", 1)]
    children = [
        in_a_process_of_its_own(config(ports, index, task, chief), 30) for task, index in tasks
    ]
    monkeypatch.setenv("TF_CONFIG", config(ports, 0, "chief" if chief else "worker", chief))
    wait_for_workers(30)
    assert [status(child) for child in children] == [0, 0]


def test_one_that_does_not_come_is_named_and_nobody_goes_on(monkeypatch):
    ports = free_ports(3)
    child = in_a_process_of_its_own(config(ports, 1), 2)
    monkeypatch.setenv("TF_CONFIG", config(ports, 0))
    with pytest.raises(
        WorkerLost, match=f"Worker 2 at 127.0.0.1:{ports[2]} did not join within 1 s"
    ):
        wait_for_workers(1)
    assert status(child) == 77


def test_a_chief_that_does_not_come(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(free_ports(2), 1))
    with pytest.raises(WorkerLost, match="Worker 0 at .* did not join within 0.5 s") as raised:
        wait_for_workers(0.5)
    assert raised.value.exit_status == 77


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("TF_CONFIG", config([taken.getsockname()[1], 1], 0))
        with pytest.raises(AddressTaken, match="Worker 0 could not bind its address"):
            wait_for_workers(1)


def test_strangers_that_connect_are_turned_away(monkeypatch):
    """One that leaves at once, as a probe does, one that talks, and one that says nothing."""
    ports = free_ports(2)
    child = in_a_process_of_its_own(config(ports, 1), 30)
    strangers = []
    while len(strangers) < 3:
        try:
            strangers.append(socket.create_connection(("127.0.0.1", ports[1]), timeout=5))
        except ConnectionRefusedError:
            time.sleep(0.05)
    strangers[0].close()
    strangers[1].sendall(b"GET / HTTP/1.0\r\n\r\n")
    monkeypatch.setenv("TF_CONFIG", config(ports, 0))
    connections, _ = wait_for_workers(30)
    assert status(child) == 0
    assert connections[1].recv(1) == b""  # to the child, which has ended


@pytest.mark.parametrize(
    ("host", "interface"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("node1", "")]
)
def test_the_rendezvous_of_one_machine_listens_there_alone(monkeypatch, host, interface):
    listened = []

    def listen(address):
        listened.append(address)
        raise OSError(1, "enough")

    cluster = {"worker": ["127.0.0.1:1", f"{host}:2"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setattr(socket, "create_server", listen)
    with pytest.raises(ConfigError, match="enough"):
        wait_for_workers(1.0)
    assert listened == [(interface, 2)]
