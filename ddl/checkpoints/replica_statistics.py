"""Replica-local statistics, which a checkpoint stores in addition to their means."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.step.moving_statistics import differ, gather_copies


class ReplicaStatistics:
    """Saves and restores the statistics of all replicas.

    Call every method on all workers, in eager, cross-replica context.
    """

    def __init__(self, all_copies: Sequence[Sequence[tf.Variable]], workers: Workers):
        """Keeps the variables.

        Args:
          all_copies: For each variable, the copies of this worker's replicas.
          workers: The workers of the strategy.
        """
        self._all_copies = all_copies
        self._workers = workers

    def tensors(self) -> dict[str, tf.Tensor]:
        """Gathers the values of the variables that differ between replicas.

        Returns:
          For each such variable, its name in a checkpoint and a tensor [replicas, …] of its dtype.
        """
        everywhere = gather_copies(self._all_copies, self._workers)
        with tf.device("CPU:0"):
            return {
                _name(number): tf.constant(np.stack(values), copies[0].dtype)
                for number, (copies, values) in enumerate(
                    zip(self._all_copies, everywhere, strict=True)
                )
                if differ(values)
            }

    def restore(self, prefix: str) -> None:
        """Restores each replica's own values, if the number of replicas is the same.

        Otherwise the replicas keep the mean, which the checkpoint's restore has assigned.

        Args:
          prefix: Path of the checkpoint, without file endings, that TensorFlow can read.
        """
        reader = tf.train.load_checkpoint(prefix)
        for number, copies in enumerate(self._all_copies):
            if reader.has_tensor(_name(number)):
                values = reader.get_tensor(_name(number))
                if len(values) == self._workers.number * len(copies):
                    own = np.split(values, self._workers.number)[self._workers.index]
                    for copy, value in zip(copies, own, strict=True):
                        copy.assign(value)


def _name(number: int) -> str:
    return f"statistics_of_replicas/{number}"
