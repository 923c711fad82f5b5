"""Statistics that each replica has of its own, as a checkpoint holds them beside their means."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ddl.statistics import values_everywhere
from ddl.workers import Workers


class ReplicaStatistics:
    """Those of all replicas. Eager, cross-replica context, on all workers; each sets its own."""

    def __init__(self, all_copies: Sequence[Sequence[tf.Variable]], workers: Workers):
        """Takes for each variable the copy of every replica of this worker."""
        self._all_copies = all_copies
        self._workers = workers

    def tensors(self) -> dict[str, tf.Tensor]:
        """Values [replicas, …] by their name in a checkpoint, where replicas differ."""
        everywhere = values_everywhere(self._all_copies, self._workers)
        named = {_name(number): tf.stack(values) for number, values in enumerate(everywhere)}
        return {
            name: values for name, values in named.items() if tf.reduce_any(values != values[0])
        }

    def restore(self, prefix: str) -> None:
        """Gives each replica what it had, if there are as many; else all have the mean."""
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
