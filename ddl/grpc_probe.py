"""Whether a TensorFlow process answers at its address, asked without TensorFlow.

A gRPC server greets whoever connects. A process that is dead refuses, and one that is stopped
stays silent, since only the kernel takes its connections then. TensorFlow's own calls would wait
for such a process for ever.
"""

import socket
from typing import Literal

Answer = Literal["greets", "refuses", "is silent", "is unreachable"]


def ask(address: str, seconds: float) -> Answer:
    """Connects, waits for the greeting and hangs up.

    Args:
      address: "host:port".
      seconds: How long to wait for each of: the connection, the greeting.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    except ConnectionRefusedError:
        return "refuses"
    except OSError:
        return "is unreachable"
    with connection:
        try:
            return "greets" if connection.recv(1) else "refuses"
        except TimeoutError:
            return "is silent"
        except OSError:
            return "refuses"
