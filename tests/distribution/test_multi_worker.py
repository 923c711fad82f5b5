"""The rendezvous of workers and the watch over them, on real connections within this process."""

import json
import os
import socket
import threading
import time

import pytest
import tensorflow as tf

from ddl.distribution import multi_worker
from ddl.distribution.cluster import ClusterTimeouts
from ddl.distribution.multi_worker import Peers, meet
from ddl.errors import AddressTaken, WorkerLost
from ddl.launcher.tasks import free_ports


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
        meet(timeout)
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
    meet(30)
    assert [status(child) for child in children] == [0, 0]


def test_one_that_does_not_come_is_named_and_nobody_goes_on(monkeypatch):
    ports = free_ports(3)
    child = in_a_process_of_its_own(config(ports, 1), 2)
    monkeypatch.setenv("TF_CONFIG", config(ports, 0))
    with pytest.raises(
        WorkerLost, match=f"Worker 2 at 127.0.0.1:{ports[2]} did not join within 1 s"
    ):
        meet(1)
    assert status(child) == 77


def test_a_chief_that_does_not_come(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(free_ports(2), 1))
    with pytest.raises(WorkerLost, match="Worker 0 at .* did not join within 0.5 s") as raised:
        meet(0.5)
    assert raised.value.exit_status == 77


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("TF_CONFIG", config([taken.getsockname()[1], 1], 0))
        with pytest.raises(AddressTaken, match="Worker 0 at 127.0.0.1:[0-9]+ could not bind"):
            meet(1)


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
    connections, _ = meet(30)
    assert status(child) == 0
    assert connections[1].recv(1) == b""  # to the child, which has ended


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "127.0.0.1"), ("node1", "")])
def test_the_rendezvous_of_one_machine_listens_there_alone(monkeypatch, host, interface):
    def listen(address):
        raise OSError(1, f"listens at {address}")

    monkeypatch.setattr(socket, "create_server", listen)
    with pytest.raises(AddressTaken, match=f"listens at .'{interface}', 2"):
        multi_worker._listening("Worker 1", f"{host}:2")


# The watch


class Ended(list):
    """What stands in for the end of a process."""

    def __init__(self):
        self.happened = threading.Event()

    def __call__(self, status):
        self.append(status)
        self.happened.set()


@pytest.fixture
def connect():
    """A watch over so many others, the chief's or a worker's, and the other ends."""
    made = []

    def make(number=2, stall_timeout=60.0, grace=0.1, *, chief=True):
        near, far = {}, {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            for index in range(1, number + 1) if chief else [0]:
                far[index] = socket.create_connection(server.getsockname())
                near[index] = server.accept()[0]
        ended = Ended()
        names = [f"worker {index} at host:{index}" for index in range(number + 1)]
        own = {"_grace": grace, "_end": ended, "_abort": lambda self, text: None}
        kind = type("Watched", (Peers,), own)
        peers = kind(near, names, ClusterTimeouts(stall=stall_timeout))
        made.append(peers)
        return peers, far, ended

    yield make
    for peers in made:
        peers.leave(1)  # waits for nobody


def lines_of(connection, wanted) -> str:
    """What comes until `wanted` is in it."""
    connection.settimeout(10)
    text = ""
    while wanted not in text:
        received = connection.recv(100).decode()
        assert received, text
        text += received
    return text


def test_one_that_dies_is_named_the_others_told_and_the_process_ended(connect, capsys):
    peers, far, ended = connect()
    far[2].close()
    assert peers.loss(wait=60) == "worker 2 at host:2 died"
    lines_of(far[1], "lost worker 2 at host:2 died\n")
    assert ended.happened.wait(60)
    assert ended == [77]
    assert "ddl: worker 2 at host:2 died. Check its log." in capsys.readouterr().err


def test_one_that_gives_no_sign_is_lost_and_one_that_does_is_not(connect):
    peers, far, _ended = connect(stall_timeout=2.5)
    until = time.monotonic() + 60
    while peers.loss() is None and time.monotonic() < until:
        far[1].sendall(b"alive\n")
        time.sleep(0.05)
    assert peers.loss() == "worker 2 at host:2 did not respond for 2.5 s"


def test_signs_of_life_are_sent(connect):
    _, far, _ = connect(stall_timeout=0.5)
    assert lines_of(far[1], "alive\nalive\n")


@pytest.mark.parametrize("status", [0, 75, 76])
def test_who_is_done_is_not_lost(connect, status):
    peers, far, _ended = connect()
    far[1].sendall(b"alive\nend")
    far[1].sendall(b"ed %d\n" % status)
    far[1].close()
    assert peers.loss(wait=0.5) is None
    far[2].sendall(b"ended 1\n")
    assert peers.loss(wait=60) == "worker 2 at host:2 ended with status 1"


def test_who_left_alone_is_lost_after_a_while(connect):
    peers, far, _ended = connect(number=1, stall_timeout=1.5)
    far[1].sendall(b"ended 75\n")
    far[1].close()
    assert peers.loss() is None
    told = "worker 1 at host:1 ended alone with status 75, 1.5 s ago"
    assert peers.loss(wait=60) == told


def test_the_chief_tells_of_others(connect):
    peers, far, _ = connect(number=1)
    far[1].sendall(b"lost worker 5 at host:5 died\n")
    assert peers.loss(wait=60) == "worker 5 at host:5 died"


def test_who_leaves_in_time_is_not_ended(connect):
    peers, far, ended = connect(grace=0.5)
    far[1].close()
    assert peers.loss(wait=60) is not None
    peers.leave(77)
    assert lines_of(far[2], "ended 77\n")
    assert not ended.happened.wait(1)


def leave(peers) -> threading.Thread:
    thread = threading.Thread(target=peers.leave, args=[0])
    thread.start()
    return thread


def test_the_chief_leaves_after_all_others_and_announces_itself_last(connect):
    """A worker that left before would abort what others still receive from it."""
    peers, far, ended = connect()
    leaves = leave(peers)
    far[1].sendall(b"ended 0\n")
    leaves.join(0.3)
    assert leaves.is_alive()
    far[2].sendall(b"ended 0\n")
    leaves.join(10)
    assert not leaves.is_alive()
    for connection in far.values():
        assert lines_of(connection, "ended 0\n").replace("alive\n", "") == "ended 0\n"
    assert not ended


def test_a_worker_announces_itself_and_leaves_after_the_chief(connect):
    peers, far, ended = connect(chief=False)
    leaves = leave(peers)
    lines_of(far[0], "ended 0\n")
    leaves.join(0.3)
    assert leaves.is_alive()
    far[0].sendall(b"ended 0\n")
    leaves.join(10)
    assert not leaves.is_alive()
    assert not ended


@pytest.mark.parametrize("chief", [True, False])
def test_who_leaves_does_not_wait_for_one_that_died(connect, chief):
    peers, far, ended = connect(number=1, grace=5, chief=chief)
    leaves = leave(peers)
    for connection in far.values():
        connection.close()
    leaves.join(10)
    assert not leaves.is_alive()
    assert not ended.happened.wait(0.5)


def test_who_leaves_waits_only_so_long(connect, monkeypatch):
    monkeypatch.setattr(multi_worker, "_LEAVE_SECONDS", 0.2)
    peers, _, ended = connect(number=1)
    leaves = leave(peers)
    leaves.join(10)
    assert not leaves.is_alive()
    assert not ended


class Watch:
    """A watch that knows of this loss."""

    def __init__(self, loss):
        self.loss = lambda wait: loss


@pytest.mark.parametrize(
    ("error", "loss", "raised", "told"),
    [
        (tf.errors.InternalError, None, tf.errors.InternalError, "a kernel failed"),
        (tf.errors.InternalError, "worker 1 died", WorkerLost, "worker 1 died"),
        (tf.errors.AbortedError, None, WorkerLost, "AbortedError: a kernel failed"),
        (tf.errors.InvalidArgumentError, "worker 1 died", tf.errors.InvalidArgumentError, "kernel"),
    ],
)
def test_a_workers_own_error_is_not_taken_for_anothers(monkeypatch, error, loss, raised, told):
    monkeypatch.setattr(multi_worker, "_PEERS", [Watch(loss)])
    where = "Graph execution error:\n\nDetected at node X (most recent call last):\n  File a\n"
    with pytest.raises(raised, match=told), multi_worker.worker_errors():
        raise error(None, None, f"{where}a kernel failed\nsomewhere")
