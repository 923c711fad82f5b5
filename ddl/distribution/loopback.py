"""Clusters on one machine: their servers accept connections only from this machine.

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
import stat
from collections.abc import Mapping, Sequence

from ddl.output import say

_DEVICE = b"lo"


def is_on_this_machine(cluster: Mapping[str, Sequence[str]]) -> bool:
    """Returns whether all addresses, host:port by kind of task, are loopback addresses."""
    return all(is_loopback(address) for addresses in cluster.values() for address in addresses)


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
    if not is_on_this_machine(cluster):
        return
    port = int(own.rpartition(":")[2])
    try:
        for listening in listening_sockets(port):
            with listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _DEVICE)
    except (OSError, AttributeError) as error:  # no /proc, or no such option
        say(
            f"The server at port {port} accepts connections from other machines, since it could "
            f"not be bound to the loopback device: {error}. Close the port in the firewall; see "
            "docs/trust.md."
        )


def listening_sockets(port: int) -> list[socket.socket]:
    """Returns copies of this process's TCP sockets that listen at a port.

    Raises:
      OSError: If the system has no /proc.
    """
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(entry)))
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and listens and one.getsockname()[1] == port:
                found.append(one)
            else:
                one.close()
    return found
