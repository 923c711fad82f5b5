"""Waiting for the other workers of a cluster before TensorFlow does, which waits for ever.

While TensorFlow joins a cluster no other Python code of the process runs, so that nobody could end
it. The workers therefore meet before, at the addresses that TF_CONFIG gives them.
"""

import contextlib
import json
import os
import socket
import time

from ddl.errors import ConfigError, WorkerLost

_GO = b"go"
_PAUSE = 0.1


def wait_for_workers(timeout: float) -> tuple[dict[int, socket.socket], list[str]]:
    """Returns when all workers that TF_CONFIG names have called it.

    Args:
      timeout: Seconds.

    Returns:
      Open connections by index, the chief's to all others and the others' to the chief, and what
      to call each worker: 'worker 1 at host:port'.

    Raises:
      WorkerLost: If some have not by then; says which.
      ConfigError: If this worker's own port cannot be used, or TF_CONFIG does not name it.
    """
    try:
        addresses, index = _addresses(json.loads(os.environ["TF_CONFIG"]))
        own_address = addresses[index]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            'TF_CONFIG does not say which worker this is. It has the form {"cluster": {"worker": '
            '["host:port", …]}, "task": {"type": "worker", "index": 0}}.'
        ) from error
    deadline = time.monotonic() + timeout
    host, _, port = own_address.rpartition(":")
    names = [f"worker {number} at {address}" for number, address in enumerate(addresses)]
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as listening:
        try:
            own = listening.enter_context(socket.create_server(("", int(port))))
        except OSError as error:
            raise ConfigError(
                f"worker {index} cannot use its address in TF_CONFIG, {host}:{port}: "
                f"{error.strerror}. Another process may have the port."
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
        own.settimeout(timeout)
        with contextlib.suppress(OSError):
            chief = stack.enter_context(own.accept()[0])
            chief.settimeout(max(_PAUSE, deadline - time.monotonic()))
            if chief.recv(len(_GO)) == _GO:
                stack.pop_all()
                return {0: chief}, names
    raise WorkerLost(_not_there(names[0], timeout))


def _connect(address: str, name: str, deadline: float, timeout: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((host, int(port)), timeout=1.0)
        except OSError:
            time.sleep(_PAUSE)
    raise WorkerLost(_not_there(name, timeout))


def _not_there(name: str, timeout: float) -> str:
    return (
        f"{name} did not join in {timeout:g} s, or another one did not. See "
        "what became of it, and start all again."
    )


def _addresses(config: dict) -> tuple[list[str], int]:
    """All workers' addresses, the chief's first, and which is this one's."""
    cluster, task = config["cluster"], config["task"]
    chiefs, workers = cluster.get("chief", []), cluster.get("worker", [])
    index = int(task["index"]) + (len(chiefs) if task["type"] == "worker" else 0)
    return [*chiefs, *workers], index
