"""Arrays kept on the devices, so that a step gathers its batch there.

Few dtypes can be gathered on every device: TensorFlow has no GPU kernel for bytes, and keeps int32
in host memory even for operations on a GPU. Each step would copy a whole array of such a dtype
between host and device. Such arrays are packed into a dtype that can be gathered.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data.arrays import ArraySource, is_in_memory
from ddl.data.source import Source
from ddl.devices.path import path_of
from ddl.devices.replicas import local_devices
from ddl.devices.wide_integers import narrowed
from ddl.errors import ConfigError

_RESIDENT_UP_TO_BYTES = 256 << 20
"""Small compared to the memory of any accelerator, and larger than CIFAR-10 (154 MB)."""

_SENT_UP_TO_BYTES = 2_000_000_000
"""Below the 2 GiB limit of a TensorFlow message."""

IN_FILES = (
    "Write the data into TFRecord files, which the workers read, or use multi_worker_mirrored, "
    "where each worker runs the program"
)
"""The remedy for data that workers of parameter servers cannot get."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Storage of arrays on one kind of device: unchanged, as int64 numbers, or in words.

    Attributes:
      kept: Names of the dtypes that are gathered unchanged.
      widened: Names of the dtypes that are stored as int64 and cast back after the gather.
      word: Integer dtype of the words that hold the rows of all other dtypes; dtypes wider than
        this take int64 words.
    """

    kept: frozenset[str]
    widened: frozenset[str]
    word: type[np.signedinteger]

    def packed(self, array: np.ndarray) -> np.ndarray:
        """Packs an array [n, …] for the device; the result is [n, words] if packed into words."""
        if array.dtype.name in self.kept:
            return array
        if array.dtype.name in self.widened:
            return array.astype(np.int64)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        word = self._word_of(array.dtype)
        rows = array.reshape(len(array), -1)
        missing = -rows.shape[1] % (word.itemsize // array.dtype.itemsize)
        if missing:
            rows = np.pad(rows, [(0, 0), (0, missing)])
        return np.ascontiguousarray(rows).view(word)

    def unpacked(self, rows: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        """Unpacks rows [b, …] of a packed array to `spec`: [b, *shape]. Replica context."""
        if spec.dtype.name in self.kept:
            return rows
        if spec.dtype.name in self.widened:
            return narrowed(rows, spec.dtype)
        parts = rows.dtype.size // spec.dtype.size
        values = tf.bitcast(rows, spec.dtype)
        values = tf.reshape(values, [rows.shape[0], rows.shape[1] * parts])
        size = spec.shape.num_elements()
        if values.shape[1] != size:
            values = values[:, :size]
        return tf.reshape(values, [rows.shape[0], *spec.shape])

    def _word_of(self, dtype: np.dtype) -> np.dtype:
        return np.dtype(self.word if dtype.itemsize <= np.dtype(self.word).itemsize else np.int64)


_FLOATS = frozenset(["bfloat16", "float16", "float32", "float64", "complex64", "complex128"])

HOST = Packing(kept=_FLOATS | {"bool", "int32", "int64"}, widened=frozenset(), word=np.int32)
"""For CPUs, which gather words faster than bytes; for TPUs; and for sending to other processes."""

GPU = Packing(
    kept=_FLOATS | {"bool", "int64"}, widened=frozenset(["int32", "uint32"]), word=np.int64
)
"""For GPUs, where int32 would be kept in host memory. Words of float32 would not, but a check for
NaN (tf.debugging.enable_check_numerics) would find NaN among the integers in them."""


def packing_for(strategy: tf.distribute.Strategy) -> Packing:
    """Returns the packing for the devices of this process's replicas."""
    return GPU if path_of(strategy).packs_int32 else HOST


def can_reside(source: ArraySource) -> bool:
    """Returns whether accelerators can hold the dtypes of all features: all but text."""
    return all(spec.dtype != tf.string for spec in source.element_spec.values())


def put_on_devices(
    source: ArraySource, strategy: tf.distribute.Strategy, packing: Packing
) -> dict[str, Any]:
    """Places the packed arrays on each replica's device. Cross-replica context.

    Returns:
      A per-replica tensor by feature name, to pass to `strategy.run`.
    """
    packed = pack(source, packing)  # once on the host, for all devices
    devices = local_devices(strategy)

    def on_device(context: tf.distribute.experimental.ValueContext) -> dict[str, tf.Tensor]:
        # In a cluster, replica ids are global, whereas `devices` are local to this worker.
        replica = context.replica_id_in_sync_group
        with tf.device(devices[replica % len(devices)] if devices else None):
            return {name: tf.constant(array) for name, array in packed.items()}

    return strategy.experimental_distribute_values_from_function(on_device)


def pack(source: ArraySource, packing: Packing) -> dict[str, np.ndarray]:
    """Packs the arrays into the form that `gather` reads."""
    return {name: packing.packed(array) for name, array in source.features.items()}


def gather(
    arrays: dict[str, tf.Tensor],
    indices: tf.Tensor,
    spec: dict[str, tf.TensorSpec],
    packing: Packing,
) -> dict[str, tf.Tensor]:
    """Gathers the examples at `indices`, int64 [b], as `ArraySource.gather` does. Replica context.

    Args:
      arrays: Packed arrays by feature name, on this replica's device.
      indices: int64 [b].
      spec: `element_spec` of the source.
      packing: The packing of `arrays`.

    Returns:
      Features [b, …] of the source's dtypes.
    """
    return {name: packing.unpacked(tf.gather(arrays[name], indices), spec[name]) for name in spec}


class ResidentArrays:
    """The arrays of a source, packed: on the devices of a strategy, or sent to other processes.

    Attributes:
      are_used: Whether batches are gathered on the devices.
    """

    def __init__(self, source: Source, wanted: bool | Literal["auto"]):
        """Decides whether the arrays reside on the devices; places nothing yet.

        Args:
          source: The examples.
          wanted: Whether the arrays reside on the devices; `auto`: up to 256 MiB.

        Raises:
          ConfigError: If `wanted` is True and the source is not numeric arrays.
        """
        self._source = source
        possible = is_in_memory(source) and can_reside(source)
        if wanted is True and not possible:
            raise ConfigError(
                f"Only numeric arrays can be kept on the devices, got {type(source).__name__}"
                + (" with text" if is_in_memory(source) else "")
                + ". Set data_on_device to 'auto' or False."
            )
        self.are_used = (
            is_in_memory(source)
            and possible
            and (wanted is True or (wanted == "auto" and source.nbytes <= _RESIDENT_UP_TO_BYTES))
        )
        self._placed: tuple[tf.distribute.Strategy, dict[str, Any]] | None = None

    def on_devices(self, strategy: tf.distribute.Strategy) -> dict[str, Any]:
        """Returns the arrays on the devices; {} if they are not used. See `resident_arrays`."""
        if not self.are_used:
            return {}
        if self._placed is None or self._placed[0] is not strategy:
            assert is_in_memory(self._source)
            with tf.init_scope():
                arrays = put_on_devices(self._source, strategy, packing_for(strategy))
                self._placed = (strategy, arrays)
        return self._placed[1]

    def gather(self, arrays: dict[str, tf.Tensor], indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """Gathers examples from a replica's own `on_devices`. Replica context."""
        packing = packing_for(tf.distribute.get_strategy())
        return gather(arrays, indices, self._source.element_spec, packing)

    def packed_to_send(self) -> dict[str, np.ndarray]:
        """Packs the arrays for other processes. See `BatchPipeline.packed_arrays`."""
        source = self._source
        if not is_in_memory(source) or not can_reside(source):
            raise ConfigError(
                f"Only numeric arrays can be sent to workers, got {type(source).__name__}. "
                f"{IN_FILES}."
            )
        if source.nbytes > _SENT_UP_TO_BYTES:
            raise ConfigError(
                f"At most 2 GB of data can be sent to workers, got {source.nbytes / 1e9:.1f} "
                f"GB. {IN_FILES}."
            )
        return pack(source, HOST)

    def gather_sent(self, arrays: dict[str, tf.Tensor], indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """Gathers examples from the arrays of `packed_to_send`, on a worker's host."""
        return gather(arrays, indices, self._source.element_spec, HOST)
