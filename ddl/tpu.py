"""TPUs: found, connected and initialized, or an error within seconds. Not run on hardware yet."""

import os
import socket
import threading
from typing import Any

import tensorflow as tf

from ddl.errors import DeviceError
from ddl.grpc_probe import ask

_GRPC = "grpc://"


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas are the cores of a TPU."""
    return isinstance(strategy, tf.distribute.TPUStrategy)


def build_tpu_strategy(timeout: float) -> tf.distribute.Strategy:
    """The TPU that the environment variable TPU_NAME means, else the one of this machine.

    TPU_NAME is `local`, an address such as grpc://10.0.0.2:8470, or the name of a Cloud TPU, which
    is looked up at Google's metadata server. Before any other operation of the process.

    Args:
      timeout: Seconds for each of: looking the name up, waiting for the TPU's answer.

    Raises:
      DeviceError: If there is no TPU, or it does not answer in time.
    """
    name = os.environ.get("TPU_NAME") or "local"
    resolver, address = _look_up(name, timeout)
    if address and ask(address.removeprefix(_GRPC), timeout) != "greets":
        raise DeviceError(
            f"the TPU {name!r} at {address} did not answer in {timeout:g} s. See whether it is "
            "running, and whether this machine may reach it."
        )
    try:
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        which = "on this machine" if name == "local" else f"at {name!r}"
        raise DeviceError(
            f"there is no TPU {which} that TensorFlow can use. On a TPU VM install libtpu; for one "
            "elsewhere set TPU_NAME to its address, such as grpc://10.0.0.2:8470. "
            f"({type(error).__name__}: {str(error).splitlines()[0][:80]}…)"
        ) from error


def _look_up(name: str, timeout: float) -> tuple[Any, str]:
    """The resolver for a TPU, and its address; none for a local one."""
    found: list[tuple[Any, str]] = []
    errors: list[Exception] = []

    def look() -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
            found.append((resolver, resolver.master()))
        except Exception as error:  # of whatever libraries take part
            errors.append(error)

    # The metadata server of a machine that has none may be waited for as long as a network wants.
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
    why = f"{errors[0]}" if errors else f"no answer in {timeout:g} s"
    raise DeviceError(
        f"the TPU {name!r} of the environment variable TPU_NAME cannot be looked up: {why}. Give "
        "its address instead, such as grpc://10.0.0.2:8470."
    )
