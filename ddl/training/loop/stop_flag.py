"""A flag that a thread raises and a training loop reads."""

import uuid

import tensorflow as tf

from ddl.distribution.workers import Workers


class StopFlag:
    """A boolean in host memory, under any strategy.

    A `tf.Variable` made in a strategy's scope would be on every device, and a read would make a GPU
    wait for the earlier updates.
    """

    def __init__(self, workers: Workers) -> None:
        """Makes a lowered flag.

        Args:
          workers: The workers that must stop at the same update.
        """
        self._workers = workers
        with tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.bool, shape=[], shared_name=f"stop {uuid.uuid4()}"
            )
        self._set(False)

    def request(self) -> None:
        """Requests a stop. Eager, from any thread."""
        self._set(True)

    def withdraw(self) -> None:
        """Withdraws this worker's request. Eager, from any thread."""
        self._set(False)

    def ends_loop(self) -> tf.Tensor:
        """Returns whether the loop must end before its next update: bool [], in a graph.

        Always False with several workers: they must make the same updates, and call `take` after
        the loop.
        """
        return self._read() if self._workers.number == 1 else tf.constant(False)

    def take(self) -> bool:
        """Returns whether any worker's flag was raised, and lowers the flag.

        Eager, cross-replica context, on all workers.
        """
        raised = self._workers.any(bool(self._read().numpy()))
        if raised:
            self.withdraw()
        return raised

    def _set(self, raised: bool) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(raised))

    def _read(self) -> tf.Tensor:
        with tf.device("CPU:0"):
            read = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.bool)
        read.set_shape([])
        return read
