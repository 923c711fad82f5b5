"""Seconds that the training loop waits for its batches, measured in the loop."""

import uuid
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from ddl.distribution.path import on_host

_Batches = TypeVar("_Batches")


class InputWait:
    """A sum of seconds in host memory, to which the loop adds without Python.

    The updates do not depend on it, so results do not change. Like `StopFlag` it is no
    `tf.Variable`, which a strategy would place on every device.
    """

    def __init__(self) -> None:
        """Makes a sum of 0 seconds."""
        with on_host():
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.float64, shape=[], shared_name=f"input wait {uuid.uuid4()}"
            )
        self.restart()

    def restart(self) -> None:
        """Sets the sum to 0. Eager."""
        with on_host():
            zero = tf.constant(0.0, tf.float64)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=zero)

    def timed(self, take: Callable[[], _Batches]) -> _Batches:
        """Returns `take()`, and adds the seconds until all of its tensors are there. In a graph.

        Args:
          take: Takes the next batches from iterators. Its tensors must be in host memory: a
            timestamp that depends on a GPU's tensor would wait for the GPU.
        """
        with on_host():
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            taken = take()
        tensors = [x for x in tf.nest.flatten(taken, expand_composites=True) if x is not None]
        with on_host(), tf.control_dependencies(tensors):
            waited = tf.timestamp() - before
            tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=waited)
        return taken

    def seconds(self) -> float:
        """Returns the sum. Eager."""
        with on_host():
            read = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.float64)
        return float(read)
