"""The tensors of a checkpoint as they are at one moment, for writing them later."""

from typing import Any

import keras
import tensorflow as tf


class Snapshots:
    """Takes the values that a `tf.train.Checkpoint` would save, without stopping for a copy.

    Reading a variable gives a tensor that shares its memory; TensorFlow's update ops see that it
    is shared and put their result elsewhere. So a snapshot costs a few milliseconds, and the
    memory of what changes while it is held. What lies on another device is copied to the host.

    TensorFlow's own asynchronous checkpoints keep a second copy of every variable for good, and
    do not tell what became of a save.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        """Learns what the checkpoint consists of, which must not change any more."""
        # TensorFlow offers no public way to the names of a checkpoint's tensors before it is
        # written; tests/test_snapshot.py tells when this one changes.
        gathered, _, registered, graph = checkpoint._saver._gather_serialized_tensors()
        if registered:
            raise NotImplementedError(f"checkpoints of {', '.join(registered)}")
        self._parts = [
            (part, list(names)) for part, names in gathered.items() if part is not None and names
        ]
        self._graph = tf.constant(graph.SerializeToString())

    def take(self) -> dict[str, tf.Tensor]:
        """The tensors by name, on the host. Eager, cross-replica context."""
        tensors = {"_CHECKPOINTABLE_OBJECT_GRAPH": self._graph}
        with tf.device("CPU:0"):
            for part, names in self._parts:
                for name, value in zip(names, _values(part), strict=True):
                    tensors[name] = tf.identity(value)
        return tensors


def _values(part: Any) -> list[tf.Tensor]:
    if isinstance(part, keras.Variable):
        part = part.value
    if isinstance(part, tf.Variable):
        # Not what TensorFlow itself would save, which sparse updates change in place.
        return [part.read_value()]
    values = part._serialize_to_tensors().values()  # such as a lookup table
    return [getattr(value, "tensor", value) for value in values]
