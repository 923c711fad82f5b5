"""The batches of an update, as a pipeline passes them to the replicas.

Small arrays lie on the devices, so that a step gathers its batch there.
Few dtypes can be gathered on every device: TensorFlow has no GPU kernel for bytes, and keeps int32
in host memory even for operations on a GPU. Each step would copy a whole array of such a dtype
between host and device. Such arrays are packed into a dtype that can be gathered.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from ddl.data.features import taken_by_tensorflow
from ddl.data.source import Source
from ddl.distribution.devices import local_devices
from ddl.distribution.path import path_of
from ddl.errors import ConfigError
from ddl.microbatch import is_compiled

RESIDENT_UP_TO_BYTES = 256 << 20
"""Small compared to the memory of any accelerator, and larger than CIFAR-10 (154 MB)."""

_WIDENED = ("int32", "uint32")
_IN_WORDS = ("int8", "uint8", "int16", "uint16", "uint64")


class Batch(NamedTuple):
    """The batches of an update, as `strategy.run` passes each replica its part.

    Attributes:
      rows: Features or "index", and "weight" unless all are 1: [rows, …] of the update; or of many
        updates, [updates, rows], if there is a `place`.
      arrays: Arrays on the replica's device that "index" refers to; {} if `rows` holds features.
      counter: `ddl.random.batch_counter` of the update's number, uint64 [2].
      place: Place of the update in `rows`, int32 or int64 []; () if `rows` holds one update.
    """

    rows: Any
    arrays: Any
    counter: tf.Tensor
    place: Any = ()


def row_of(batch: Batch) -> dict[str, tf.Tensor]:
    """Returns an update's row of a table."""
    on_host = batch.place.dtype == tf.int32 or not path_of().has_own_memory
    if on_host and not is_compiled():  # the rows are a view
        return {name: rows[batch.place] for name, rows in batch.rows.items()}
    # A slice would read the place on the host, and so make the host wait for a GPU.
    return {name: tf.gather(rows, batch.place) for name, rows in batch.rows.items()}


def static_slice(rows: tf.Tensor, first: tf.Tensor | int, size: int) -> tf.Tensor:
    """Returns `size` rows from number `first` on, in static shape. In a graph."""
    if is_compiled():  # XLA would compile a strided slice anew for each place
        places = tf.stack([first] + [0] * (rows.shape.rank - 1))
        return tf.slice(rows, places, [size, *rows.shape[1:]])
    return tf.ensure_shape(rows[first : first + size], [size, *rows.shape[1:]])


def packed(array: np.ndarray, for_gpus: bool) -> np.ndarray:
    """Packs an array for a device.

    Args:
      array: Examples [n, …].
      for_gpus: Whether GPUs gather from it. There int32 would be kept in host memory. So would no
        words of float32, but a check for NaN (tf.debugging.enable_check_numerics) would find NaN
        among the integers in them.

    Returns:
      The array itself; or int64 [n, …]; or words that hold its rows, int64 [n, words].
    """
    array = taken_by_tensorflow(array)
    if for_gpus and array.dtype.name in _WIDENED:
        return array.astype(np.int64)
    if not for_gpus or array.dtype.name not in _IN_WORDS:
        return array
    rows = array.reshape(len(array), -1)
    missing = -rows.shape[1] % (8 // array.dtype.itemsize)
    return np.ascontiguousarray(np.pad(rows, [(0, 0), (0, missing)])).view(np.int64)


def are_resident(source: Any, wanted: bool | Literal["auto"]) -> bool:
    """Returns whether the arrays of a source reside on the devices.

    Args:
      source: The examples, a `Source` or a stream.
      wanted: Whether they should; `auto`: up to 256 MiB.

    Raises:
      ConfigError: If `wanted` is True and the source is not numeric arrays.
    """
    arrays = numeric_arrays(source)
    if wanted is True and arrays is None:
        raise ConfigError(f"data_on_device = True needs arrays of numbers, got {source.name}.")
    small = sum(array.nbytes for array in (arrays or {}).values()) <= RESIDENT_UP_TO_BYTES
    return arrays is not None and (small if wanted == "auto" else wanted)


def placed(source: Any, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Puts a source's arrays on each replica's device. Cross-replica context, also while tracing.

    Returns:
      Packed arrays by feature, per-replica.
    """
    for_gpus = path_of(strategy).has_own_memory
    values = {name: packed(one, for_gpus) for name, one in (numeric_arrays(source) or {}).items()}
    with tf.init_scope():
        return on_each_replica(strategy, lambda _: values)


def numeric_arrays(source: Any) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a source if its examples are their rows and hold no text; else None."""
    arrays = source.arrays if isinstance(source, Source) else None
    if arrays is None or any(spec.dtype == tf.string for spec in source.element_spec.values()):
        return None
    return arrays


def gather(
    arrays: dict[str, tf.Tensor], indices: tf.Tensor, spec: dict[str, tf.TensorSpec]
) -> dict[str, tf.Tensor]:
    """Gathers examples from packed arrays.

    Args:
      arrays: Packed arrays by feature name.
      indices: int64 [b].
      spec: `element_spec` of the source.

    Returns:
      Features [b, …] of the source's dtypes.
    """
    return {name: _unpacked(tf.gather(arrays[name], indices), spec[name]) for name in spec}


def _unpacked(rows: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if rows.dtype == spec.dtype or spec.dtype.name in _WIDENED:
        return tf.cast(rows, spec.dtype)
    values = tf.reshape(tf.bitcast(rows, spec.dtype), [rows.shape[0], -1])
    size = spec.shape.num_elements()
    if values.shape[1] != size:  # the last word is not full
        values = values[:, :size]
    return tf.reshape(values, [rows.shape[0], *spec.shape])


def on_each_replica(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """Puts arrays on the device of each replica. Cross-replica context, eager.

    Args:
      strategy: The strategy.
      values: A function from the number of a replica of this process, from 0, to a dict of arrays.

    Returns:
      A per-replica tensor by name, to pass to `strategy.run`.
    """
    devices = local_devices(strategy)

    def on_device(context: tf.distribute.experimental.ValueContext) -> dict[str, tf.Tensor]:
        # In a cluster, replica ids are global, whereas `devices` are local to this worker.
        own = context.replica_id_in_sync_group % len(devices) if devices else 0
        with tf.device(devices[own] if devices else None):
            return {name: tf.constant(_Once(array)) for name, array in values(own).items()}

    return strategy.experimental_distribute_values_from_function(on_device)


class _Once:
    """An array that TensorFlow copies once: of a plain one, which may change, it makes two."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array
