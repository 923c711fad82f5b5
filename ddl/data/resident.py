"""Arrays on the devices, so that a step gathers its batch there.

Few dtypes can be gathered on every device: TensorFlow has no GPU kernel for bytes, and keeps int32
in host memory even for operations on a GPU. Each step would copy a whole array of such a dtype
between host and device. Such arrays are packed into a dtype that can be gathered.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.data.features import taken_by_tensorflow
from ddl.data.source import Source
from ddl.distribution.devices import local_devices
from ddl.distribution.path import path_of
from ddl.errors import ConfigError

_RESIDENT_UP_TO_BYTES = 256 << 20
"""Small compared to the memory of any accelerator, and larger than CIFAR-10 (154 MB)."""


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
        array = taken_by_tensorflow(array)
        if array.dtype.name in self.kept:
            return array
        if array.dtype.name in self.widened:
            return array.astype(np.int64)
        word = np.dtype(self.word if array.dtype.itemsize <= self.word().itemsize else np.int64)
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
            return tf.cast(rows, spec.dtype)
        parts = rows.dtype.size // spec.dtype.size
        values = tf.bitcast(rows, spec.dtype)
        values = tf.reshape(values, [rows.shape[0], rows.shape[1] * parts])
        size = spec.shape.num_elements()
        if values.shape[1] != size:
            values = values[:, :size]
        return tf.reshape(values, [rows.shape[0], *spec.shape])


_FLOATS = frozenset(["bfloat16", "float16", "float32", "float64", "complex64", "complex128"])

HOST = Packing(kept=_FLOATS | {"bool", "int32", "int64"}, widened=frozenset(), word=np.int32)
"""For CPUs, which gather words faster than bytes; for TPUs; and for sending to other processes."""

GPU = Packing(
    kept=_FLOATS | {"bool", "int64"}, widened=frozenset(["int32", "uint32"]), word=np.int64
)
"""For GPUs, where int32 would be kept in host memory. Words of float32 would not, but a check for
NaN (tf.debugging.enable_check_numerics) would find NaN among the integers in them."""


class ResidentArrays:
    """The arrays of a source, packed, on the devices of a strategy.

    Attributes:
      are_used: Whether batches are gathered on the devices.
    """

    def __init__(self, source: Any, wanted: bool | Literal["auto"]):
        """Decides whether the arrays reside on the devices; places nothing yet.

        Args:
          source: The examples, a `Source` or a stream.
          wanted: Whether the arrays reside on the devices; `auto`: up to 256 MiB.

        Raises:
          ConfigError: If `wanted` is True and the source is not numeric arrays.
        """
        self._spec = source.element_spec
        self._arrays = numeric_arrays(source)
        if wanted is True and self._arrays is None:
            raise ConfigError(
                f"Only arrays of numbers can be kept on the devices, got {source.name}. Set "
                "data_on_device to 'auto' or False."
            )
        small = sum(a.nbytes for a in (self._arrays or {}).values()) <= _RESIDENT_UP_TO_BYTES
        self.are_used = self._arrays is not None and (
            wanted is True or (wanted == "auto" and small)
        )
        self._placed: tuple[tf.distribute.Strategy, dict[str, Any]] | None = None

    def on_devices(self, strategy: tf.distribute.Strategy) -> dict[str, Any]:
        """Returns the arrays on each replica's device, per-replica; {} if they are not used.

        Cross-replica context, eager or while tracing.
        """
        if not self.are_used:
            return {}
        if self._placed is None or self._placed[0] is not strategy:
            assert self._arrays is not None
            packing = _packing_for(strategy)
            packed = {name: packing.packed(array) for name, array in self._arrays.items()}
            with tf.init_scope():
                self._placed = (strategy, on_each_replica(strategy, lambda _: packed))
        return self._placed[1]

    def gather(self, arrays: dict[str, tf.Tensor], indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """Gathers the examples at `indices`, int64 [b], from `on_devices`. Replica context.

        Returns:
          Features [b, …] of the source's dtypes.
        """
        packing = _packing_for(tf.distribute.get_strategy())
        return gather(arrays, indices, self._spec, packing)


def numeric_arrays(source: Any) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a source if its examples are their rows and hold no text; else None."""
    arrays = source.arrays if isinstance(source, Source) else None
    if arrays is None or any(spec.dtype == tf.string for spec in source.element_spec.values()):
        return None
    return arrays


def gather(
    arrays: dict[str, tf.Tensor],
    indices: tf.Tensor,
    spec: dict[str, tf.TensorSpec],
    packing: Packing,
) -> dict[str, tf.Tensor]:
    """Gathers examples from packed arrays.

    Args:
      arrays: Packed arrays by feature name.
      indices: int64 [b].
      spec: `element_spec` of the source.
      packing: The packing of `arrays`.

    Returns:
      Features [b, …] of the source's dtypes.
    """
    return {name: packing.unpacked(tf.gather(arrays[name], indices), spec[name]) for name in spec}


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
            return {name: tf.constant(array) for name, array in values(own).items()}

    return strategy.experimental_distribute_values_from_function(on_device)


def _packing_for(strategy: tf.distribute.Strategy) -> Packing:
    return GPU if path_of(strategy).packs_int32 else HOST
