"""The all-reduce of the gradients: packed into few buffers, optionally in a narrower dtype.

Several workers pack gradients into buffers of a given size, last layers first. The backward pass
computes these first, so that their all-reduce overlaps with the rest of the pass.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import keras
import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
    cross_device_utils,
    distribute_utils,
    values,
)

from ddl.devices.packing import Packed
from ddl.devices.path import path_of
from ddl.distribution.communication import Communication
from ddl.errors import check_choice
from ddl.layers.replica_gather import all_to_all

GradientDtype = Literal["bfloat16", "float16"]
_Options: TypeAlias = tf.distribute.experimental.CommunicationOptions
_SUM = tf.distribute.ReduceOp.SUM


class AllReduce:
    """Sums gradients over all replicas, once per update. Cross-replica context, in a tf.function.

    With a `dtype`, each replica's gradient is rounded to it, the rounded gradients are added in the
    variable's dtype, and the sum is rounded. One device rounds in the same way, so that N devices
    and N workers compute the same. Another number of replicas rounds different values. The idea
    goes back to Seide et al. 2014, "1-bit stochastic gradient descent"; Horovod offers float16
    without the wider sum.

    Sparse gradients are not rounded.

    Attributes:
      dtype: Dtype to which gradients are rounded, or None.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communication: Communication,
        dtype: GradientDtype | None = None,
    ):
        """Keeps the arguments.

        Args:
          strategy: The strategy under which the gradients are computed.
          communication: Buffer size in bytes, timeout in seconds, and implementation.
          dtype: Dtype to which gradients are rounded; None: not rounded.

        Raises:
          ConfigError: If `dtype` is not a `GradientDtype` or None, or `communication` asks for NCCL
            without a GPU.
        """
        if dtype is not None:
            check_choice("gradient_dtype", dtype, get_args(GradientDtype))
        self._strategy = strategy
        self._options = communication.options()
        self.dtype = None if dtype is None else tf.as_dtype(dtype)
        # TensorFlow's reduce adds in the dtype that it sends. Its underlying collectives, one
        # launcher per device, are private attributes, checked by tests/step/test_all_reduce.py.
        self._launchers: Sequence[Any] = ()
        operations = getattr(strategy.extended, "_cross_device_ops", None)
        if isinstance(operations, cross_device_ops.CollectiveAllReduce):
            self._launchers = operations._launchers

    @property
    def rounds(self) -> bool:
        """Whether gradients are rounded to another dtype, also with one replica."""
        return self.dtype is not None

    def __call__(self, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
        """Returns the sums, one per variable, present on every replica.

        Args:
          gradients: One value per variable; a per-replica value with several replicas.
          variables: The variables, in the order of the gradients.
        """
        if self.dtype is None:
            return self._summed(gradients, variables)
        if not self._launchers:
            rounded = self._strategy.run(self._rounded, args=(list(gradients),))
            return list(self._strategy.run(self._rounded, args=(self._summed(rounded, variables),)))
        sums: list[Any] = [None] * len(gradients)
        sparse = [cross_device_utils.is_indexed_slices(gradient) for gradient in gradients]
        for is_sparse, reduce in ((False, self._sent_rounded), (True, self._summed)):
            places = [place for place, found in enumerate(sparse) if found == is_sparse]
            reduced = reduce([gradients[i] for i in places], [variables[i] for i in places])
            for place, gradient in zip(places, reduced, strict=True):
                sums[place] = gradient
        return sums

    def of_sums(self, sums: Any) -> tf.Tensor:
        """Returns the sum of a float64 vector over all replicas, on the first one's device.

        `tf.distribute.Strategy.reduce` adds on the host, for which GPUs would have to wait.

        Args:
          sums: The vector of each replica.
        """
        if not path_of(self._strategy).packs_tensors:
            return self._strategy.reduce(_SUM, sums, axis=None)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        reduced = self._strategy.extended.reduce_to(_SUM, sums, sums, self._options)
        return self._strategy.experimental_local_results(reduced)[0]

    def _rounded(self, gradients: list[Any]) -> list[Any]:
        """Rounds dense gradients to the dtype and casts them back. Replica context."""

        def rounded(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(tf.cast(values, self.dtype), values.dtype)

        dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
        packs = path_of(self._strategy).packs_tensors
        changed = iter(Packed(dense).each(rounded) if packs else map(rounded, dense))
        return [g if isinstance(g, tf.IndexedSlices) else next(changed) for g in gradients]

    def _summed(self, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
        """Calls TensorFlow's reduce, which packs in reverse order, one dtype at a time."""
        sums: list[Any] = list(gradients)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        # The reduce concatenates the gradients of a buffer, so they must share a dtype.
        for dtype in dict.fromkeys(variable.value.dtype for variable in variables):
            places = [i for i, v in enumerate(variables) if v.value.dtype == dtype]
            pairs = [(gradients[i], variables[i].value) for i in places]
            reduced = self._strategy.extended.batch_reduce_to(_SUM, pairs, self._options)
            for place, gradient in zip(places, reduced, strict=True):
                sums[place] = gradient
        return sums

    def _sent_rounded(
        self, gradients: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> list[Any]:
        """Sums dense gradients that are sent in the narrow dtype and added in their own."""
        by_device = zip(*map(self._strategy.experimental_local_results, gradients), strict=True)
        sums = []
        for launcher, device, own in zip(
            self._launchers, self._strategy.extended.worker_devices, by_device, strict=True
        ):
            with tf.device(device):
                sums.append(self._exchanged(launcher, own, variables))
        return [
            distribute_utils.regroup(copies, wrap_class=values.Mirrored)
            for copies in zip(*sums, strict=True)
        ]

    def _exchanged(
        self, launcher: Any, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """Returns the sums of `_sent_rounded` for one replica, on its device."""
        sums: list[Any] = [None] * len(gradients)
        sizes = [variable.value.shape.num_elements() for variable in variables]
        limit = self._options.bytes_per_pack // tf.as_dtype(self.dtype).size
        for buffer in buffers(sizes, limit):
            flat = [tf.cast(tf.reshape(gradients[i], [-1]), self.dtype) for i in buffer]
            wide = max((gradients[i].dtype for i in buffer), key=lambda dtype: dtype.size)
            total = self._summed_over_all(launcher, tf.concat(flat, axis=0), wide)
            parts = tf.split(total, [sizes[i] for i in buffer], axis=0)
            for place, part in zip(buffer, parts, strict=True):
                own = tf.cast(part, gradients[place].dtype)
                sums[place] = tf.reshape(own, gradients[place].shape)
        return sums

    def _summed_over_all(self, launcher: Any, flat: tf.Tensor, wide: tf.DType) -> tf.Tensor:
        """Sums one buffer [n] over all replicas in dtype `wide`; returns the buffer's dtype."""
        replicas = self._strategy.num_replicas_in_sync
        size = flat.shape[0]
        # The all-gather does not support bfloat16. A bitcast to float16 sends the same bits.
        sent = tf.bitcast(flat, tf.float16)

        def gathered(row: tf.Tensor) -> tf.Tensor:
            rows = launcher._all_gather(row[tf.newaxis], self._options)
            return tf.bitcast(tf.ensure_shape(rows, [replicas, *row.shape]), flat.dtype)

        def added(rows: tf.Tensor) -> tf.Tensor:
            return tf.cast(tf.reduce_sum(tf.cast(rows, wide), axis=0), flat.dtype)

        if replicas == 2:
            return added(gathered(sent))
        # Each replica sums its share of the buffer and sends the result to all replicas. This moves
        # as many bytes as a ring all-reduce, but adds in the wider dtype.
        share = -(-size // replicas)
        shares = tf.reshape(tf.pad(sent, [[0, share * replicas - size]]), [replicas, share])
        rows = tf.ensure_shape(all_to_all(launcher, shares, self._options), shares.shape)
        own = added(tf.bitcast(rows, flat.dtype))
        return tf.reshape(gathered(tf.bitcast(own, tf.float16)), [-1])[:size]


def buffers(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Assigns gradients to buffers, last gradient first, until a buffer is full.

    Args:
      sizes: Number of elements of each gradient, in the order of the layers.
      limit: Number of elements at which a buffer is full; 0 makes one buffer.

    Returns:
      One list per buffer, of positions in `sizes`.
    """
    made: list[list[int]] = []
    held = 0
    for place in reversed(range(len(sizes))):
        if not made or (limit and held >= limit):
            made.append([])
            held = 0
        made[-1].append(place)
        held += sizes[place]
    return made
