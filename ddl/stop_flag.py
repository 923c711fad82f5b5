"""A flag that a thread raises and a training loop reads."""

import uuid

import tensorflow as tf

from ddl.workers import Workers


class StopFlag:
    """One boolean on the host, whatever strategy's scope it is made in.

    A `tf.Variable` made in a scope would lie on every device, and reading it there would make a
    GPU wait for the updates before.
    """

    def __init__(self, workers: Workers) -> None:
        """Lowered.

        Args:
          workers: Who has to stop at the same update.
        """
        self._workers = workers
        with tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.bool, shape=[], shared_name=f"stop {uuid.uuid4()}"
            )
        self._set(False)

    def raise_it(self) -> None:
        """Asks for a stop. Eager, from any thread."""
        self._set(True)

    def cuts_loop_short(self) -> tf.Tensor:
        """Whether the running loop is to end after its present update: bool []. In its condition.

        Never with several workers, which have to make the same updates: they ask after a loop.
        """
        return self._read() if self._workers.number == 1 else tf.constant(False)

    def take(self) -> bool:
        """Whether any worker's was raised; lowers it. Eager, cross-replica context, on all."""
        raised = self._workers.any(bool(self._read().numpy()))
        if raised:
            self._set(False)
        return raised

    def _set(self, raised: bool) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(raised))

    def _read(self) -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.bool)
