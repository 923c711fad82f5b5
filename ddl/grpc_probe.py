"""Whether a TensorFlow process answers at its address, asked without TensorFlow.

A gRPC server greets whoever connects. A process that is dead refuses, and one that is stopped
stays silent, since only the kernel takes its connections then. TensorFlow's own calls would wait
for such a process for ever.
"""

import socket
from typing import Literal

Answer = Literal["greets", "refuses", "is silent"]


def ask(address: str, seconds: float) -> Answer:
    """Connects, waits for the greeting and hangs up.

    Args:
      address: "host:port".
      seconds: How long to wait. A host that cannot be reached or found is silent.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            return "greets" if connection.recv(1) else "refuses"
    except (ConnectionRefusedError, ConnectionResetError):
        return "refuses"
    except OSError:
        return "is silent"
