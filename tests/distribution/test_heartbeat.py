"""The watch over other workers, on real connections within this process."""

import contextlib
import socket
import sys
import threading
import time

import pytest
from ddl.distribution.heartbeat import Peers

from ddl.distribution import heartbeat as module


class Ended(list):
    """What stands in for the end of a process."""

    def __init__(self):
        self.happened = threading.Event()

    def __call__(self, status):
        self.append(status)
        self.happened.set()


@pytest.fixture(autouse=True)
def _no_collectives(monkeypatch):
    monkeypatch.setattr(module, "_break_off", lambda text: None)


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
        peers = Peers(
            near, names, peer_timeout=30, stall_timeout=stall_timeout, grace=grace, end=ended
        )
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
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 0.2)
    peers, _, ended = connect(number=1)
    leaves = leave(peers)
    leaves.join(10)
    assert not leaves.is_alive()
    assert not ended


def test_a_worker_ends_though_it_cannot_say_why(connect, monkeypatch):
    """The thread that ends the process must not die of a full disk."""
    broken = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", broken)
    _, far, ended = connect(number=1)
    far[1].close()
    assert ended.happened.wait(60)
    assert ended == [77]
    with contextlib.suppress(OSError):
        broken.close()
