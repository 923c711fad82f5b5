"""A flag that a thread raises and a running training loop reads."""

import uuid

import tensorflow as tf


class StopFlag:
    """One boolean on the host, whatever strategy's scope it is made in.

    A `tf.Variable` made in a scope would lie on every device, and reading it there would make a
    GPU wait for the updates before.
    """

    def __init__(self) -> None:
        """Lowered."""
        with tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.bool, shape=[], shared_name=f"stop {uuid.uuid4()}"
            )
        self.set(False)

    def set(self, raised: bool) -> None:
        """Raises or lowers it. Eager, from any thread."""
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(raised))

    def read(self) -> tf.Tensor:
        """Whether it is raised: bool []. Eager or in a graph, cross-replica context."""
        with tf.device("CPU:0"):
            return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.bool)
