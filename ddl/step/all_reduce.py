"""The all-reduce of the gradients, packed into few buffers.

Several workers pack gradients into buffers of a given size, last layers first. The backward pass
computes these first, so that their all-reduce overlaps with the rest of the pass.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.distribution.communication import Communication
from ddl.distribution.path import path_of

_SUM = tf.distribute.ReduceOp.SUM


class AllReduce:
    """Sums gradients over all replicas. Cross-replica context, in a graph."""

    def __init__(self, strategy: tf.distribute.Strategy, communication: Communication):
        """Keeps the arguments.

        Args:
          strategy: The strategy under which the gradients are computed.
          communication: Buffer size in bytes, timeout in seconds, and implementation.

        Raises:
          ConfigError: If `communication` asks for NCCL without a GPU.
        """
        self._strategy = strategy
        self._options = communication.options()

    def __call__(self, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
        """Returns the sums, one per variable, present on every replica.

        TensorFlow's reduce packs in reverse order, one dtype at a time.

        Args:
          gradients: One value per variable; a per-replica value with several replicas.
          variables: The variables, in the order of the gradients.
        """
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

    def of_sums(self, sums: Any) -> tf.Tensor:
        """Returns the sum of a float64 vector over all replicas, on the first one's device.

        `tf.distribute.Strategy.reduce` adds on the host, for which GPUs would have to wait.

        Args:
          sums: The vector of each replica.
        """
        if not path_of(self._strategy).sums_on_devices:
            return self._strategy.reduce(_SUM, sums, axis=None)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        reduced = self._strategy.extended.reduce_to(_SUM, sums, sums, self._options)
        return self._strategy.experimental_local_results(reduced)[0]
