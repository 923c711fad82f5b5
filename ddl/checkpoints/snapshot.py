"""Snapshots of the tensors of a checkpoint, for a later write."""

import keras
import tensorflow as tf


class Snapshots:
    """Takes the values that a `tf.train.Checkpoint` would save, without copying host variables.

    Reading a variable gives a tensor that shares its memory. TensorFlow's update ops detect the
    sharing and write to new memory. A snapshot therefore takes a few milliseconds, plus memory for
    the variables that change while it is held. Variables on other devices are copied to the host.

    TensorFlow's own asynchronous checkpoints fail with Keras 3 at the second save
    (tests/step/test_keras_canaries.py), and hold a second copy of every variable permanently.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        """Lists the checkpoint's tensors; its set of variables must not change afterwards."""
        self._checkpoint = checkpoint
        self._variables: dict[str, tf.Variable] = {}
        self._others: dict[str, tf.Tensor] = {}
        self._gather()

    def take(self) -> dict[str, tf.Tensor]:
        """Returns the tensors by name, on the host. Eager, cross-replica context."""
        if len(self._others) > 1:
            self._gather()  # values of non-variables, such as tables, are read here
        return self._read() | {name: tf.identity(value) for name, value in self._others.items()}

    @tf.function(autograph=False)
    def _read(self) -> dict[str, tf.Tensor]:
        with tf.device("CPU:0"):
            # Sparse updates would change the result of Checkpoint's own read in place.
            return {name: tf.identity(v.read_value()) for name, v in self._variables.items()}

    def _gather(self) -> None:
        # TensorFlow has no public API for the names of a checkpoint's tensors before it is
        # written; tests/checkpoints/test_snapshot.py fails if this one changes. The call is slow
        # for a large model, so `take` repeats it only if there are more non-variables than the
        # object graph.
        gathered, _, registered, _ = self._checkpoint._saver._gather_serialized_tensors()
        if registered:
            raise NotImplementedError(
                f"ddl cannot save objects with registered savers: {', '.join(registered)}."
            )
        for part, tensors in gathered.items():
            variable = part.value if isinstance(part, keras.Variable) else part
            for name, tensor in tensors.items():
                if isinstance(variable, tf.Variable):
                    self._variables[name] = variable
                else:
                    self._others[name] = getattr(tensor, "tensor", tensor)
