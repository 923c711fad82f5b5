"""The devices of this process's replicas."""

from typing import Any

import tensorflow as tf


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas.

    Empty for the default strategy.
    """
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:
        return ()


def gpu_is_split() -> bool:
    """Returns whether this process sees several logical devices on one GPU."""
    # Listing the logical devices would start TensorFlow, before a cluster is joined.
    seen = tf.config.get_visible_devices("GPU")
    return any(len(tf.config.get_logical_device_configuration(gpu) or ()) > 1 for gpu in seen)


def replica_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas.

    For the default strategy, returns the device that TensorFlow uses by default.
    """
    # Under the default strategy TensorFlow places operations on the first GPU, if there is one.
    default = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return local_devices(strategy) or (default,)


def is_on_server(variable: Any) -> bool:
    """Returns whether a parameter server holds a variable."""
    device = getattr(variable, "device", None)
    return isinstance(device, str) and "/job:ps/" in device
