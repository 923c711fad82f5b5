"""Detection and reports of workers that died, cannot be reached, or stall.

The connections over which the workers met stay open: one between the chief and each other worker.
The chief tells the other workers about losses. The kernel closes the connection of a process that
dies. If a machine is gone, the kernel's keep-alive probes (TCP) go unanswered. A stopped process
sends no signs of life, although its kernel still answers the probes.

TensorFlow reports neither which worker was lost nor how; it only aborts collectives.
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
from ddl.output import say

# Exit statuses on which all workers agree. All then end, though not at the same moment; a worker
# that still trains long after a peer's exit did not agree.
_AGREED = (0, TrainingInterrupted.exit_status, TrainingDiverged.exit_status)

# Seconds that a process waits at its end for the others, which end at almost the same moment.
_LEAVE_SECONDS = 30.0

_ALIVE, _ENDED, _LOST = b"alive", b"ended", b"lost"
_REMEDY = "Check its log. Restart all workers; they resume from the last checkpoint."


class Peers:
    """A thread that watches the connections to other workers, from construction on."""

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
        """Takes over the connections and starts the thread.

        Args:
          connections: Connections to other workers, by worker index.
          names: Names of all workers, for messages.
          peer_timeout: Seconds after which a worker is lost if its machine does not answer.
          stall_timeout: Seconds after which a worker is lost if it sends no sign of life.
          grace: Seconds between a loss and the end of the process, for a more specific error or to
            finish a checkpoint.
          end: Ends the process with an exit status, whatever it is waiting for.
        """
        self._connections = dict(connections)
        self._is_chief = 0 not in connections
        self._names = names
        self._peer_timeout, self._stall_timeout = peer_timeout, stall_timeout
        self._grace, self._end = grace, end
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._unread = dict.fromkeys(connections, b"")
        self._left: dict[int, tuple[float, str]] = {}  # time of the exit, exit status
        self._loss: str | None = None
        self._is_lost, self._is_over = threading.Event(), threading.Event()
        self._is_alone = threading.Event()  # no connected worker is still in its run
        self._ended: list[socket.socket] = []  # kept open, since closing one says "died"
        self._selector = selectors.DefaultSelector()
        for index, connection in connections.items():
            _keep_alive(connection, peer_timeout)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, index)
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def loss(self, wait: float = 0.0) -> str | None:
        """Returns a message about the first loss: which worker, and how. None if there is no loss.

        Args:
          wait: Seconds to wait for a loss.
        """
        self._is_lost.wait(wait)
        return self._loss

    def leave(self, status: int) -> None:
        """Announces to the connected workers that this process ends. Call it once, at the end.

        On a status on which all agree, it returns when all others have left too, or after
        `_LEAVE_SECONDS`: one process may have the result of the last collective while another still
        receives it from the first one. The chief hears from all and announces itself last.

        Args:
          status: Exit status of this process.
        """
        if status not in _AGREED:
            self._is_over.set()
            self._announce(status)
        elif self._is_chief:
            self._wait_until_alone()
            self._is_over.set()
            self._announce(status)
        else:
            self._announce(status)
            self._wait_until_alone()
            self._is_over.set()

    def _announce(self, status: int) -> None:
        for connection in [*self._connections.values(), *self._ended]:
            _send(connection, b"%s %d" % (_ENDED, status))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # sent data still arrives

    def _wait_until_alone(self) -> None:
        until = time.monotonic() + _LEAVE_SECONDS
        while not (self._is_alone.wait(0.02) or self._is_lost.is_set()):
            if time.monotonic() > until:
                return

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
                # This process itself was suspended, and messages of the others may still be unread.
                self._heard = dict.fromkeys(self._heard, time.monotonic())
            for key, _ in ready:
                self._read(key.data)
            now = time.monotonic()
            for index, at in list(self._heard.items()):
                if index in self._connections and now - at > self._stall_timeout:
                    self._lose(index, f"did not respond for {self._stall_timeout:g} s")
            for index, (at, status) in list(self._left.items()):
                if now - at > self._stall_timeout:
                    how = f"ended alone with status {status}, {self._stall_timeout:g} s ago"
                    self._lose(index, how)
            if not self._connections:
                self._is_alone.set()
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
            return self._lose(index, f"was unreachable for {self._peer_timeout:g} s")
        if not received:
            return self._lose(index, "died")
        self._heard[index] = time.monotonic()
        *lines, self._unread[index] = (self._unread[index] + received).split(b"\n")
        for line in lines:
            word, _, rest = line.partition(b" ")
            if word == _ENDED:
                self._ended.append(self._connections.pop(index))
                self._selector.unregister(self._ended[-1])
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
        """Reports the loss to the others, aborts collectives, and ends the process."""
        text = f"{self._loss}. {_REMEDY}"
        for connection in self._connections.values():
            _send(connection, _LOST + b" " + str(self._loss).encode())
        threading.Thread(target=_break_off, args=(text,), daemon=True).start()
        if not self._is_over.wait(self._grace):
            say(text)
            self._end(WorkerLost.exit_status)


def lost(loss: str | None, error: str) -> WorkerLost:
    """Builds the WorkerLost error.

    Args:
      loss: The result of `Peers.loss`.
      error: TensorFlow's error, which the message shows if no loss is known.
    """
    return WorkerLost(f"{loss or f'Another process died or stalled ({error})'}. {_REMEDY}")


def _break_off(text: str) -> None:
    """Aborts pending collectives, which then raise an error. May block."""
    context.context().abort_collective_ops(errors.UNAVAILABLE, text)


def _send(connection: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # reading reports the failure
        connection.send(line + b"\n")


def _keep_alive(connection: socket.socket, timeout: float) -> None:
    """Enables TCP keep-alive on a connection.

    On Linux the kernel gives up on a machine that has not answered for `timeout` seconds.
    """
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
