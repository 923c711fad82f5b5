"""A probe for TensorFlow servers that does not use TensorFlow.

A gRPC server sends a greeting to each connection. For a dead process the kernel refuses the
connection. For a stopped process the kernel accepts it, but no greeting follows. TensorFlow's own
calls would wait for a stopped process forever.
"""

import socket
from typing import Literal

Answer = Literal["greets", "refuses", "is silent", "is unreachable"]


def ask(address: str, seconds: float) -> Answer:
    """Connects, waits for the greeting and closes the connection.

    Args:
      address: "host:port".
      seconds: Timeout for the connection, and again for the greeting.

    Returns:
      "greets" if the greeting arrived; "refuses" if the connection was refused or closed; "is
      silent" if no greeting arrived in time; "is unreachable" if no connection was made for any
      other reason, such as a timeout.
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
