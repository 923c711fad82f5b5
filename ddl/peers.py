"""Noticing that another worker of the cluster died, cannot be reached, or stalls, and saying which.

The connections over which the workers met stay open. The chief has one to every other worker, each
of these one to the chief, which tells them of the rest. A process that dies closes its own. Of a
machine that is gone the kernel hears nothing any more (TCP keep-alive), while a process that is
stopped still has a kernel that answers, but sends no signs of life.

TensorFlow tells neither which worker it was nor the two apart, and only breaks off what runs.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from tensorflow.python.eager import context
from tensorflow.python.framework import errors

from ddl.errors import TrainingDiverged, TrainingInterrupted, WorkerLost

# How workers end that have agreed to: all of them do, though not all are done with it at once.
# One that is still training long after that has not agreed.
_AGREED = (0, TrainingInterrupted.exit_status, TrainingDiverged.exit_status)
_ALIVE, _ENDED, _LOST = b"alive", b"ended", b"lost"
_REMEDY = "See what became of it. Start all again: they go on from the last checkpoint."


class Peers:
    """Watches the other workers from a thread of its own, from the construction on."""

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        names: list[str],
        *,
        peer_timeout: float,
        stall_timeout: float,
        grace: float = 5.0,
        end: Callable[[int], object] = os._exit,
    ):
        """Takes the connections over.

        Args:
          connections: To other workers, by their index.
          names: All workers', for messages.
          peer_timeout: Seconds after which one whose machine does not answer is lost.
          stall_timeout: Seconds after which one that gives no sign of life is lost.
          grace: Seconds between a loss and the end of the process, for whoever has a better word
            to say, or a checkpoint to finish.
          end: Ends the process with a status, whatever it is waiting for.
        """
        self._connections = dict(connections)
        self._names = names
        self._peer_timeout, self._stall_timeout = peer_timeout, stall_timeout
        self._grace, self._end = grace, end
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._unread = dict.fromkeys(connections, b"")
        self._left: dict[int, tuple[float, str]] = {}  # when, and with which status
        self._loss: str | None = None
        self._is_lost, self._is_over = threading.Event(), threading.Event()
        self._selector = selectors.DefaultSelector()
        for index, connection in connections.items():
            _keep_alive(connection, peer_timeout)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, index)
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def loss(self, wait: float = 0.0) -> str | None:
        """Which worker was lost and how, for a person; None if none was within `wait` seconds."""
        self._is_lost.wait(wait)
        return self._loss

    def leave(self, status: int) -> None:
        """Tells the others that this process ends by itself, with a status. Once, at its end."""
        self._is_over.set()
        for connection in list(self._connections.values()):  # the thread may just take one out
            _send(connection, b"%s %d" % (_ENDED, status))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # what was sent arrives nevertheless

    def _watch(self) -> None:
        pause = min(5.0, self._stall_timeout / 5)
        next_sign = time.monotonic()
        while (
            (self._connections or self._left) and not self._is_over.is_set() and self._loss is None
        ):
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + pause
                for connection in self._connections.values():
                    _send(connection, _ALIVE)
            began = time.monotonic()
            ready = self._selector.select(max(0.0, next_sign - began))
            if time.monotonic() - began > 2 * pause:
                # This process has been stopped itself: what the others sent may not be read yet.
                self._heard = dict.fromkeys(self._heard, time.monotonic())
            for key, _ in ready:
                self._read(key.data)
            now = time.monotonic()
            for index, at in list(self._heard.items()):
                if index in self._connections and now - at > self._stall_timeout:
                    self._lose(index, f"gave no sign of life for {self._stall_timeout:g} s")
            for index, (at, status) in list(self._left.items()):
                if now - at > self._stall_timeout:
                    how = f"ended with status {status} {self._stall_timeout:g} s ago, alone"
                    self._lose(index, how)
        if self._loss is not None and not self._is_over.is_set():
            self._give_up()

    def _read(self, index: int) -> None:
        try:
            received = self._connections[index].recv(4096)
        except BlockingIOError:
            return None
        except (ConnectionResetError, BrokenPipeError):
            received = b""
        except OSError:
            return self._lose(index, f"could not be reached for {self._peer_timeout:g} s")
        if not received:
            return self._lose(index, "died")
        self._heard[index] = time.monotonic()
        *lines, self._unread[index] = (self._unread[index] + received).split(b"\n")
        for line in lines:
            word, _, rest = line.partition(b" ")
            if word == _ENDED:
                self._selector.unregister(self._connections.pop(index))
                if int(rest) in _AGREED:
                    self._left[index] = time.monotonic(), rest.decode()
                else:
                    self._lose(index, f"ended with status {rest.decode()}")
                return None
            if word == _LOST:
                self._note(rest.decode())
        return None

    def _lose(self, index: int, how: str) -> None:
        self._note(f"{self._names[index]} {how}")
        connection = self._connections.pop(index, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()

    def _note(self, loss: str) -> None:
        if self._loss is None:
            self._loss = loss
            self._is_lost.set()

    def _give_up(self) -> None:
        """Tells the others, breaks off what TensorFlow waits for, and ends the process."""
        text = f"{self._loss}. {_REMEDY}"
        for connection in self._connections.values():
            _send(connection, _LOST + b" " + str(self._loss).encode())
        threading.Thread(target=_break_off, args=(text,), daemon=True).start()
        if not self._is_over.wait(self._grace):
            print(f"ddl: {text}", file=sys.stderr, flush=True)
            self._end(WorkerLost.exit_status)


def lost(loss: str | None, error: str) -> WorkerLost:
    """The error that says so; `error` is what TensorFlow raised."""
    return WorkerLost(f"{loss or f'another process died or stalls ({error})'}. {_REMEDY}")


def _break_off(text: str) -> None:
    """Lets collectives that wait raise an error. It may wait itself."""
    context.context().abort_collective_ops(errors.UNAVAILABLE, text)


def _send(connection: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # what became of it, reading says
        connection.send(line + b"\n")


def _keep_alive(connection: socket.socket, timeout: float) -> None:
    """Lets the kernel ask whether the other machine is there, and give up after `timeout` s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        seconds = max(1, int(timeout / 3))
        for option, value in (
            (socket.TCP_KEEPIDLE, seconds),
            (socket.TCP_KEEPINTVL, seconds),
            (socket.TCP_KEEPCNT, 2),
            (socket.TCP_USER_TIMEOUT, int(1000 * timeout)),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
