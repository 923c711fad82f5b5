"""The tensors of a checkpoint as they are at one moment, for writing them later."""

import keras
import tensorflow as tf


class Snapshots:
    """Takes the values that a `tf.train.Checkpoint` would save, without stopping for a copy.

    Reading a variable gives a tensor that shares its memory; TensorFlow's update ops see that it
    is shared and put their result elsewhere. So a snapshot costs a few milliseconds, and the
    memory of what changes while it is held. What lies on another device is copied to the host.

    TensorFlow's own asynchronous checkpoints fail with Keras 3 at the second save
    (tests/test_keras_canaries.py), and keep a second copy of every variable for good.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        """Learns what the checkpoint consists of, which must not change any more."""
        self._checkpoint = checkpoint
        self._variables: dict[str, tf.Variable] = {}
        self._others: dict[str, tf.Tensor] = {}
        self._gather()

    def take(self) -> dict[str, tf.Tensor]:
        """The tensors by name, on the host. Eager, cross-replica context."""
        if len(self._others) > 1:
            self._gather()  # what is no variable, such as a table, is read when it is gathered
        return self._read() | {name: tf.identity(value) for name, value in self._others.items()}

    @tf.function(autograph=False)
    def _read(self) -> dict[str, tf.Tensor]:
        with tf.device("CPU:0"):
            # Not TensorFlow's own way to read, whose results sparse updates change in place.
            return {name: tf.identity(v.read_value()) for name, v in self._variables.items()}

    def _gather(self) -> None:
        # TensorFlow offers no public way to the names of a checkpoint's tensors before it is
        # written; tests/test_snapshot.py tells when this one changes. It takes a while for a large
        # model, so that it is done once where there are variables alone beside the object graph.
        gathered, _, registered, _ = self._checkpoint._saver._gather_serialized_tensors()
        if registered:
            raise NotImplementedError(f"checkpoints of {', '.join(registered)}")
        for part, tensors in gathered.items():
            variable = part.value if isinstance(part, keras.Variable) else part
            for name, tensor in tensors.items():
                if isinstance(variable, tf.Variable):
                    self._variables[name] = variable
                else:
                    self._others[name] = getattr(tensor, "tensor", tensor)
