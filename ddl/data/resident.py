"""Arrays kept on the devices, so that a step gathers its batch without leaving them."""

from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.arrays import ArraySource

# What GatherV2 has GPU kernels for. The rest, bytes above all, would be gathered on the CPU, with
# the whole array copied there in every step; it travels in words of 32 or 64 bits instead.
_GATHERED = frozenset(
    [
        "bool",
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
        "complex64",
        "complex128",
    ]
)


def can_reside(source: ArraySource) -> bool:
    """Whether all features are of dtypes that accelerators hold."""
    return all(spec.dtype != tf.string for spec in source.element_spec.values())


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Names of the devices of this process's replicas; none for the default strategy."""
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:
        return ()


def on_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether all of them are CPUs; so they are for the default strategy."""
    return all("CPU" in device.upper() for device in local_devices(strategy))


def place(source: ArraySource, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Puts the arrays on each replica's own device. Cross-replica context.

    Returns:
      By feature name a per-replica tensor, to be handed to `strategy.run`.
    """
    packed = pack(source)  # once on the host, whatever the number of devices
    devices = local_devices(strategy)

    def on_device(context: tf.distribute.experimental.ValueContext) -> dict[str, tf.Tensor]:
        # With several workers, replica numbers are global and devices are this worker's own.
        replica = context.replica_id_in_sync_group
        with tf.device(devices[replica % len(devices)] if devices else None):
            return {name: tf.constant(array) for name, array in packed.items()}

    return strategy.experimental_distribute_values_from_function(on_device)


def pack(source: ArraySource) -> dict[str, np.ndarray]:
    """The arrays in the form that `gather` reads."""
    return {name: _packed(array) for name, array in source.features.items()}


def gather(
    arrays: dict[str, tf.Tensor], indices: tf.Tensor, spec: dict[str, tf.TensorSpec]
) -> dict[str, tf.Tensor]:
    """The examples at `indices`, int64 [b], as `ArraySource.gather` gives them. Replica context."""
    return {name: _unpacked(tf.gather(arrays[name], indices), spec[name]) for name in spec}


def _packed(array: np.ndarray) -> np.ndarray:
    """[n, …] as rows of words, [n, words], where gathering wants it."""
    if array.dtype.name in _GATHERED:
        return array
    word = np.dtype(np.int64 if array.dtype.itemsize == 8 else np.int32)
    rows = array.reshape(len(array), -1)
    missing = -rows.shape[1] % (word.itemsize // array.dtype.itemsize)
    if missing:
        rows = np.pad(rows, [(0, 0), (0, missing)])
    return np.ascontiguousarray(rows).view(word)


def _unpacked(rows: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """Undoes `_packed` on [b, words]."""
    if spec.dtype.name in _GATHERED:
        return rows
    values = tf.reshape(tf.bitcast(rows, spec.dtype), [rows.shape[0], -1])
    size = spec.shape.num_elements()
    if values.shape[1] != size:
        values = values[:, :size]
    return tf.reshape(values, [rows.shape[0], *spec.shape])
