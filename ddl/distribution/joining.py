"""A rendezvous of a cluster's workers, with a timeout, before TensorFlow joins without one.

No other Python code of the process runs while TensorFlow joins a cluster, so nothing could end the
process then. The workers therefore first connect to each other, at their addresses in TF_CONFIG.
"""

import contextlib
import errno
import socket
import time

from ddl.distribution.loopback import is_loopback
from ddl.distribution.tf_config import cluster_role
from ddl.errors import AddressTaken, ConfigError, WorkerLost

# Messages of the rendezvous. Other clients, such as a port probe, send none of them.
_CHIEF, _WORKER, _GO = b"ddl chief\n", b"ddl worker\n", b"go\n"
_PAUSE = 0.1
# Timeout for an answer: members of the cluster answer at once.
_ANSWER_SECONDS = 2.0


def wait_for_workers(timeout: float) -> tuple[dict[int, socket.socket], list[str]]:
    """Waits until all workers in TF_CONFIG have connected.

    Args:
      timeout: Seconds to wait.

    Returns:
      Open connections by worker index: the chief's to all others, and each other worker's to the
      chief. Then the names of all workers for messages: 'Worker 1 at host:port'.

    Raises:
      WorkerLost: If a worker has not joined in time. The chief's error names the first missing
        worker; the others' errors name the chief.
      AddressTaken: If another process uses this worker's port.
      ConfigError: If the port cannot be used for another reason, or TF_CONFIG is malformed or does
        not name this worker.
    """
    role = cluster_role()
    addresses, index = role.workers, role.worker_index
    deadline = time.monotonic() + timeout
    host, _, port = addresses[index].rpartition(":")
    names = [f"Worker {number} at {address}" for number, address in enumerate(addresses)]
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as listening:
        try:
            # On several machines the address may be that of a proxy, or a name.
            interface = host if is_loopback(addresses[index]) and ":" not in host else ""
            own = listening.enter_context(socket.create_server((interface, int(port))))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise (AddressTaken if taken else ConfigError)(
                f"Worker {index} could not bind its address in TF_CONFIG, {host}:{port}: "
                f"{error.strerror}. Another process may use the port; choose a free one."
            ) from error
        if index == 0:
            others = {
                number: stack.enter_context(_connect(address, names[number], deadline, timeout))
                for number, address in enumerate(addresses)
                if number
            }
            for number, other in others.items():
                try:
                    other.sendall(_GO)
                except OSError as error:
                    raise WorkerLost(_not_there(names[number], timeout)) from error
            stack.pop_all()
            return others, names
        while (left := deadline - time.monotonic()) > 0:
            own.settimeout(left)
            with contextlib.suppress(OSError):
                caller = own.accept()[0]
                if _goes(caller, deadline):
                    return {0: caller}, names
                caller.close()
    raise WorkerLost(_not_there(names[0], timeout))


def _goes(caller: socket.socket, deadline: float) -> bool:
    """Returns whether the caller is the chief and sends the start signal before the deadline."""
    with contextlib.suppress(OSError):
        caller.settimeout(_ANSWER_SECONDS)
        if _says(caller, _CHIEF):
            caller.sendall(_WORKER)
            caller.settimeout(max(_PAUSE, deadline - time.monotonic()))
            return _says(caller, _GO)
    return False


def _says(other: socket.socket, word: bytes) -> bool:
    received = b""
    while len(received) < len(word) and (more := other.recv(len(word) - len(received))):
        received += more
    return received == word


def _connect(address: str, name: str, deadline: float, timeout: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            other = socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS)
            stack.enter_context(other)
            # The worker may have to turn other callers away first.
            other.settimeout(max(_PAUSE, min(3 * _ANSWER_SECONDS, deadline - time.monotonic())))
            other.sendall(_CHIEF)
            if _says(other, _WORKER):
                stack.pop_all()
                return other
        time.sleep(_PAUSE)
    raise WorkerLost(_not_there(name, timeout))


def _not_there(name: str, timeout: float) -> str:
    return (
        f"{name} did not join within {timeout:g} s, or another worker did not. Check its log, then "
        "restart all workers."
    )
