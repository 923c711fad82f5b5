"""TPU strategies, with timeouts for finding the TPU. Not yet run on hardware."""

import os
import socket
import threading
from typing import Any

import tensorflow as tf

from ddl.distribution.grpc_probe import ask
from ddl.errors import DeviceError

_GRPC = "grpc://"


def build_tpu_strategy(timeout: float) -> tf.distribute.Strategy:
    """Connects to and initializes a TPU. Must run before any other operation of the process.

    The environment variable TPU_NAME selects the TPU: `local` (the default, the TPU of this
    machine), an address such as grpc://10.0.0.2:8470, or the name of a Cloud TPU, which Google's
    metadata server resolves.

    Args:
      timeout: Seconds for resolving the name, and again for each of connection and greeting.
        Connecting TensorFlow and initializing the TPU have no timeout.

    Raises:
      DeviceError: If there is no TPU, or it does not answer in time.
    """
    name = os.environ.get("TPU_NAME") or "local"
    resolver, address = _look_up(name, timeout)
    if address and ask(address.removeprefix(_GRPC), timeout) != "greets":
        raise DeviceError(
            f"The TPU {name!r} at {address} did not answer within {timeout:g} s. Check that it is "
            "running and that this machine can reach it."
        )
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        which = "on this machine" if name == "local" else f"at {name!r}"
        raise DeviceError(
            f"TensorFlow found no TPU {which}. On a TPU VM, install libtpu. For a remote TPU, set "
            f"TPU_NAME to its address, such as grpc://10.0.0.2:8470. ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:80]}…)"
        ) from error


def _look_up(name: str, timeout: float) -> tuple[Any, str]:
    """Returns the resolver for a TPU, and its address; "" for a local TPU."""
    found: list[tuple[Any, str]] = []
    errors: list[Exception] = []

    def look() -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
            found.append((resolver, resolver.master()))
        except Exception as error:  # several libraries may raise
            errors.append(error)

    # On a machine without a metadata server, the request may hang as long as the network allows.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout)
    try:
        thread = threading.Thread(target=look, name="look up the TPU", daemon=True)
        thread.start()
        thread.join(timeout)
    finally:
        socket.setdefaulttimeout(before)
    if found:
        return found[0]
    why = f"{errors[0]}" if errors else f"no answer within {timeout:g} s"
    raise DeviceError(
        f"The TPU {name!r} from the environment variable TPU_NAME could not be looked up: {why}. "
        "Set TPU_NAME to its address instead, such as grpc://10.0.0.2:8470."
    )
