"""A cluster of equal workers: they meet with a time limit, watch each other, and leave.

No Python code of the process runs while TensorFlow joins a cluster, and TensorFlow waits forever.
The workers therefore connect to each other first, at their addresses in TF_CONFIG. The connections
stay open: one between the chief and each other worker. The chief tells the other workers about
losses. The kernel closes the connection of a process that dies. The kernel of a machine that is
gone acknowledges no signs of life. A stopped process sends none, but its kernel acknowledges them.

TensorFlow reports neither which worker was lost nor how; it only aborts collectives.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context

from ddl import errors
from ddl.distribution.addresses import close_to_other_machines, is_loopback, taken
from ddl.distribution.cluster import ClusterTimeouts, cluster_role
from ddl.distribution.communication import reduce_options
from ddl.distribution.devices import split_into
from ddl.distribution.workers import Workers
from ddl.output import say
from ddl.signals import keeping_handlers

_REMEDY = "Check its log. Restart all workers; they resume from the last checkpoint."

# Messages of the rendezvous. Other clients, such as a port probe, send none of them.
_CHIEF, _WORKER, _GO = b"ddl chief\n", b"ddl worker\n", b"go\n"
_PAUSE = 0.1
# Timeout for an answer: members of the cluster answer at once.
_ANSWER_SECONDS = 2.0

_ALIVE, _ENDED, _LOST = b"alive\n", b"ended", b"lost"
# Exit statuses on which all workers agree. All then end, though not at the same moment; a worker
# that still trains long after a peer's exit did not agree.
_AGREED = (0, errors.TrainingInterrupted.exit_status, errors.TrainingDiverged.exit_status)
# Seconds that a process waits at its end for the others, which end at almost the same moment.
_LEAVE_SECONDS = 30.0

# This process's peers. A process joins at most one cluster.
_PEERS: list["Peers"] = []

# Errors that TensorFlow raises for a collective that was aborted or that a peer never joins. A
# worker's own computation can raise the last two.
_MAY_BE_ITS_OWN = (tf.errors.FailedPreconditionError, tf.errors.InternalError)
_ABORTED = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_BROKEN_OFF = (*_ABORTED, tf.errors.DeadlineExceededError, *_MAY_BE_ITS_OWN)


# ---------------------------------------------------------------- the rendezvous


def meet(timeout: float) -> tuple[dict[int, socket.socket], list[str]]:
    """Waits until all workers in TF_CONFIG have connected.

    Args:
      timeout: Seconds to wait.

    Returns:
      Open connections by worker index: the chief's to all others, and each other worker's to the
      chief. Then the names of all workers for messages: 'Worker 1 at host:port'.

    Raises:
      WorkerLost: If a worker has not joined in time. The chief's error names the first missing
        worker; the others' errors name the chief.
      AddressTaken: If this worker's port cannot be used.
      ConfigError: If TF_CONFIG is malformed or does not name this worker.
    """
    role, deadline = cluster_role(), time.monotonic() + timeout
    workers, own = role.workers, role.worker_index
    names = [f"Worker {index} at {address}" for index, address in enumerate(workers)]
    found: dict[int, socket.socket] = {}
    with _listening(names[own], workers[own]) as listening:
        for index in [0] if own else range(1, len(workers)):
            while index not in found:
                if (left := deadline - time.monotonic()) <= 0:
                    raise errors.WorkerLost(
                        f"{names[index]} did not join within {timeout:g} s, or another worker did "
                        "not. Check its log, then restart all workers."
                    )
                with contextlib.suppress(OSError):
                    listening.settimeout(left)
                    other = listening.accept()[0] if own else _call(workers[index])
                    if _is_chief(other, left) if own else _is_worker(other, left):
                        found[index] = other
                    else:
                        other.close()
    for other in () if own else found.values():
        _send(other, _GO)
    return found, names


def _listening(name: str, address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    # On several machines the address may be that of a proxy, or a name.
    interface = host if is_loopback(address) and ":" not in host else ""
    try:
        return socket.create_server((interface, int(port)))
    except OSError as error:
        raise taken(name, error.strerror) from error


def _call(address: str) -> socket.socket:
    time.sleep(_PAUSE)
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS)


def _is_worker(called: socket.socket, left: float) -> bool:
    """Returns whether a worker answers the chief, which may have to turn others away first."""
    called.settimeout(min(3 * _ANSWER_SECONDS, left))
    called.sendall(_CHIEF)
    return called.recv(len(_WORKER)) == _WORKER


def _is_chief(caller: socket.socket, left: float) -> bool:
    """Returns whether the chief calls a worker, and sends the start signal in time."""
    caller.settimeout(_ANSWER_SECONDS)
    if caller.recv(len(_CHIEF)) != _CHIEF:
        return False
    caller.sendall(_WORKER)
    caller.settimeout(left)
    return caller.recv(len(_GO)) == _GO


# ---------------------------------------------------------------- the watch


class Peers:
    """Threads that watch the connections to other workers, from construction on."""

    # Seconds between a loss and the end of the process, for a more specific error or to finish a
    # checkpoint.
    _grace = 5.0
    # Ends the process, whatever it is waiting for.
    _end = staticmethod(os._exit)

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        names: Sequence[str],
        timeouts: ClusterTimeouts,
    ):
        """Takes over the connections and starts the threads.

        Args:
          connections: Connections to other workers, by worker index.
          names: Names of all workers, for messages.
          timeouts: Seconds after which a worker is lost whose machine does not answer (`peer`), or
            that sends no sign of life (`stall`).
        """
        self._connections, self._timeouts = list(connections.values()), timeouts
        self._is_chief = 0 not in connections
        self._pause = min(5.0, timeouts.stall / 5)  # seconds between two signs of life
        self._gone: set[str] = set()  # names of the workers that have ended or are lost
        self._loss: str | None = None
        self._is_lost, self._is_over = threading.Event(), threading.Event()
        for index, connection in connections.items():
            connection.settimeout(self._pause)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel's limit for unanswered signs
                limit = int(1000 * timeouts.peer)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
            given = (connection, names[index])
            threading.Thread(target=self._watch, args=given, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

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
        agreed = status in _AGREED
        if agreed and self._is_chief:
            self._wait_for_others()
        self._is_over.set()
        for connection in self._connections:
            _send(connection, b"%s %d\n" % (_ENDED, status))
        if agreed and not self._is_chief:
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        until = time.monotonic() + _LEAVE_SECONDS
        while len(self._gone) < len(self._connections) and time.monotonic() < until:
            if self._is_lost.wait(0.02):
                return

    def _beat(self) -> None:
        while not self._is_over.wait(self._pause):
            for connection in self._connections:
                _send(connection, _ALIVE)

    def _watch(self, connection: socket.socket, name: str) -> None:
        """Ends the process after a loss, which it reports to the others, unless it ends itself."""
        loss, patience = self._hear(connection, name)
        self._gone.add(name)
        if self._is_over.wait(patience) or self._loss is not None:
            return
        self._loss = loss
        self._is_lost.set()
        for other in self._connections:
            _send(other, b"%s %s\n" % (_LOST, loss.encode()))
        text = f"{loss}. {_REMEDY}"
        threading.Thread(target=self._abort, args=(text,), daemon=True).start()
        if not self._is_over.wait(self._grace):
            say(text)
            self._end(errors.WorkerLost.exit_status)

    @staticmethod
    def _abort(text: str) -> None:
        """Aborts pending collectives, which then raise an error. May block."""
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)

    def _hear(self, connection: socket.socket, name: str) -> tuple[str, float]:
        """Reads until a worker ends or is lost; returns how, and for how long to bear that."""
        unread, heard, stall = b"", time.monotonic(), self._timeouts.stall
        while True:
            began, received = time.monotonic(), None
            try:
                received = connection.recv(4096)
            except (ConnectionResetError, BrokenPipeError):
                received = b""
            except OSError as error:
                if error.errno is not None:  # the kernel's timeout, not that of Python
                    return f"{name} was unreachable for {self._timeouts.peer:g} s", 0.0
            now = time.monotonic()
            if received or now - began > 2 * self._pause:  # this process itself was suspended
                heard = now
            if received == b"":
                return f"{name} died", 0.0
            if now - heard > stall:
                return f"{name} did not respond for {stall:g} s", 0.0
            *lines, unread = (unread + (received or b"")).split(b"\n")
            for word, _, rest in (line.partition(b" ") for line in lines):
                if word == _LOST:
                    return rest.decode(), 0.0
                if word == _ENDED and int(rest) in _AGREED:
                    return f"{name} ended alone with status {int(rest)}, {stall:g} s ago", stall
                if word == _ENDED:
                    return f"{name} ended with status {int(rest)}", 0.0


def _send(connection: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # reading reports the failure
        connection.sendall(line)


# ---------------------------------------------------------------- the strategy


class _Extended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """TensorFlow's implementation with ddl's timeouts, and with all virtual CPU devices.

    TensorFlow's own would use one CPU device of a worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy, options: Any, timeouts: ClusterTimeouts):
        self._timeouts = timeouts
        super().__init__(strategy, None, options)

    def _initialize_local_devices(self, resolver: Any, worker: str) -> tuple[tuple[str, ...], str]:
        found, kind = super()._initialize_local_devices(resolver, worker)
        if kind == "CPU":
            count = split_into("CPU")
            found = tuple(f"{worker}/device:CPU:{number}" for number in range(count))
        return found, kind

    def _update_config_proto(self, config: Any) -> Any:
        """Sets TensorFlow's heartbeat as a fallback: `Peers` detects a loss first and names it."""
        config = super()._update_config_proto(config)
        service = config.experimental.coordination_config
        service.cluster_register_timeout_in_ms = int(1000 * self._timeouts.join)
        service.heartbeat_timeout_in_ms = int(2000 * max(self._timeouts[1:]))
        return config


def build_multi_worker_strategy(timeouts: ClusterTimeouts) -> tf.distribute.Strategy:
    """Joins the cluster in TF_CONFIG. Must run before any other operation of the process.

    Call it from the main thread.

    Args:
      timeouts: Seconds to wait for others to join, and seconds of silence after which a worker is
        lost.

    Raises:
      WorkerLost: If other workers do not join in time. If they die after the rendezvous but before
        TensorFlow has joined, SIGALRM ends the process shortly after the join timeout, since no
        Python code runs then.
      AddressTaken: If this worker's port cannot be used, as when another process uses it.
      ConfigError: If TF_CONFIG does not name several workers with this one among them.
    """
    role = cluster_role()
    if len(role.workers) < 2:
        raise errors.ConfigError(
            "multi_worker_mirrored needs the environment variable TF_CONFIG with at least two "
            "workers. `python -m ddl.launch --num_workers=2 -- …` sets it. For a single process "
            "use --strategy=mirrored."
        )
    own, kind = role.workers[role.worker_index], tf.distribute.MultiWorkerMirroredStrategy
    _PEERS.append(Peers(*meet(timeouts.join), timeouts))
    signal.setitimer(signal.ITIMER_REAL, timeouts.join + 5.0)  # TensorFlow may raise before
    try:
        with worker_errors(), keeping_handlers():
            strategy = kind.__new__(kind)
            extended = _Extended(strategy, reduce_options(), timeouts)
            tf.distribute.Strategy.__init__(strategy, extended)
            # Not earlier: no Python code runs while TensorFlow joins.
            close_to_other_machines(role.cluster, own)
            Workers(strategy).any(False)  # a barrier: all workers have joined when it returns
            return strategy
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    """Converts errors of broken collectives into one line that names the lost process.

    Raises:
      WorkerLost: Instead of TensorFlow's error. InternalError and FailedPreconditionError pass
        through unless a loss is known.
    """
    try:
        yield
    except _BROKEN_OFF as error:
        # TensorFlow may raise before `Peers` knows of the loss.
        loss = next(filter(None, [each.loss(wait=2.0) for each in _PEERS]), None)
        if loss is None and isinstance(error, _MAY_BE_ITS_OWN):
            raise
        if loss is None:
            cause = errors.message_of(error).partition("\n")[0]
            loss = f"Another process died or stalled ({cause})"
        raise errors.WorkerLost(f"{loss}. {_REMEDY}") from error


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Reports the exit status to the other workers when the `with` block ends.

    The status is 0 if the block returns, and the error's `exit_status` if it raises a DdlError.

    Unexpected errors are not announced; peers notice when the process exits. The process that
    failed is therefore the first to end, and its output shows the cause.
    """
    status = -1
    try:
        yield
        status = 0
    except errors.DdlError as error:
        status = error.exit_status
        raise
    finally:
        for each in _PEERS if status >= 0 else ():
            each.leave(status)
