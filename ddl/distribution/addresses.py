"""Addresses of the processes of a cluster, host:port: who answers there, and who may connect.

TensorFlow's servers execute what any client sends, without authentication, and listen on all
interfaces whatever address TF_CONFIG gives (`GrpcServer::Init` takes only the port). TensorFlow
2.21 has no option for this. But Linux lets a process bind its own listening socket to the loopback
device afterwards, without privileges from version 5.7 on; connections through other devices are
then refused.
"""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from ddl.distribution.cluster import ClusterTimeouts
from ddl.errors import AddressTaken
from ddl.output import say

Answer = Literal["greets", "refuses", "is silent", "is unreachable"]


def ask(address: str, seconds: float) -> Answer:
    """Connects to a TensorFlow server, waits for the greeting of gRPC and closes the connection.

    TensorFlow's own calls would wait for a stopped process forever: the kernel accepts its
    connections, but no greeting follows.

    Args:
      address: "host:port".
      seconds: Timeout for the connection, and again for the greeting.

    Returns:
      "greets" if the greeting arrived; "refuses" if the connection was refused or closed, as that
      of a dead process; "is silent" if no greeting arrived in time; "is unreachable" if no
      connection was made for any other reason, such as a timeout.
    """
    host, _, port = address.rpartition(":")
    is_connected = False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            is_connected = True
            return "greets" if connection.recv(1) else "refuses"
    except ConnectionError:
        return "refuses"
    except OSError:
        return "is silent" if is_connected else "is unreachable"


def silence(answer: Answer, heard: float, timeouts: ClusterTimeouts) -> str | None:
    """Returns how a task is lost, such as "is silent since 300 s"; None if it is not.

    Args:
      answer: The task's last answer to `ask`.
      heard: Time (`time.monotonic`) at which it was last well.
      timeouts: Seconds for which it may be silent (`stall`), or not be reached (`peer`).
    """
    silent = time.monotonic() - heard
    patience = timeouts.stall if answer == "is silent" else timeouts.peer
    return f"{answer} since {silent:.0f} s" if silent > patience else None


def taken(task: str, why: object) -> AddressTaken:
    """Builds the error of a task that cannot listen at its address."""
    return AddressTaken(
        f"{task} could not bind its address in TF_CONFIG: {why}. Another process may use the port; "
        "choose a free one."
    )


def is_loopback(address: str) -> bool:
    """Returns whether the host of an address, host:port, is localhost or a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def close_to_other_machines(cluster: Mapping[str, Sequence[str]], own: str) -> None:
    """Binds this process's server to the loopback device, if all of the cluster is on this machine.

    Reports a server that stays open, as on another system than Linux.

    Args:
      cluster: Addresses, host:port, by kind of task.
      own: Address of this process; its server listens on that port.
    """
    if not all(is_loopback(address) for addresses in cluster.values() for address in addresses):
        return
    port = int(own.rpartition(":")[2])
    try:
        for one in _listening_at(port):
            with one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    except (OSError, AttributeError) as error:  # no /proc, or no such option
        say(
            f"Other machines can connect to port {port}, which could not be bound to the loopback "
            f"device: {error}. Close the port in the firewall; see docs/clusters.md, Trust."
        )


def _listening_at(port: int) -> list[socket.socket]:
    """Returns copies of this process's sockets that listen at a port."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            one = stack.enter_context(socket.fromfd(int(entry), socket.AF_INET, socket.SOCK_STREAM))
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and one.getsockname()[1:2] == (port,):  # of a Unix socket, it is a text
                found.append(one)
                stack.pop_all()
    return found
