"""The rendezvous of workers and the watch over them, on real connections within this process."""

import json
import os
import socket
import threading

import pytest
import tensorflow as tf

from ddl.distribution import multi_worker
from ddl.distribution.cluster import ClusterTimeouts
from ddl.distribution.multi_worker import Peers, meet
from ddl.errors import WorkerLost
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
    lost = f"Worker 2 at 127.0.0.1:{ports[2]} did not join within 1 s"
    with pytest.raises(WorkerLost, match=lost):
        meet(1)
    assert status(child) == 77


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
    connection.settimeout(60)
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
    leaves.join(60)
    assert not leaves.is_alive()
    for connection in far.values():
        assert lines_of(connection, "ended 0\n").replace("alive\n", "") == "ended 0\n"
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
