"""Snapshots of the tensors of a checkpoint, for a later write, and their digest."""

import hashlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.checkpoints.slots import WholeSlot
from ddl.distribution.devices import is_on_server
from ddl.errors import ConfigError

_OTHERS = ("_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter", "state", "callbacks")
"""Parts of a checkpoint that say where a run stands."""


class Snapshots:
    """Takes the values that a `tf.train.Checkpoint` would save, without copying host variables.

    Reading a host variable gives a tensor that shares its memory; a snapshot takes memory for the
    variables that change while it is held. A variable on a GPU is copied to the host once, from
    the first replica.

    Later updates leave a snapshot as it is, by TensorFlow's sources (2.21):

    - A read shares the buffer and counts the reference (`ReadVariableOp`). An update writes in
      place only if the variable holds the only reference, else to a copy
      (`PrepareToUpdateVariable`). Once a sparse update has touched a variable, each read copies
      (`copy_on_read_mode`), on the same stream as the updates.
    - The copy to the host waits for all earlier work of the GPU's compute stream, and holds a
      reference to the buffer until it is complete (`GPUUtil::CopyGPUTensorToCPU`).
    - A variable on a parameter server is read on its own: once a sparse update has touched it, its
      server copies it for the read, and must not hold copies of all its variables at once.
    - `take` returns when all copies are complete, so no later update runs beside them, and the
      snapshot shares no memory with variables on GPUs. ddl makes no further copy.

    TensorFlow's own asynchronous checkpoints fail with Keras 3 at the second save
    (tests/step/test_keras_canaries.py), and hold a second copy of every variable permanently.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        """Lists the checkpoint's tensors; its set of variables must not change afterwards."""
        self._checkpoint = checkpoint
        self._variables: dict[str, tf.Variable] = {}
        self._on_servers: dict[str, tf.Variable] = {}
        self._others: dict[str, tf.Tensor] = {}
        self._slots: dict[str, WholeSlot] = {}
        self._traced: Any = None
        self._gather()

    def take(self, keeps: bool = True) -> dict[str, tf.Tensor]:
        """Returns the tensors by name, on the host. Eager, cross-replica context, on all workers.

        Slots in shares are gathered one by one, so that only the host holds all of them whole.

        Args:
          keeps: Whether this worker needs the tensors; else it helps to gather and returns none.
        """
        slots = {}
        with tf.device("CPU:0"):
            for name, slot in self._slots.items():
                whole = slot.whole()
                if keeps:
                    slots[name] = tf.constant(whole)
        return self._take_own() | slots if keeps else {}

    def _take_own(self) -> dict[str, tf.Tensor]:
        """Returns the tensors that this worker holds whole."""
        # On the CPU, since a function called on a GPU returns its results there.
        with tf.device("CPU:0"):
            if len(self._others) > 1:
                self._gather()  # values of non-variables, such as tables, are read here
            others = {name: tf.identity(value) for name, value in self._others.items()}
            others |= {name: tf.identity(v.read_value()) for name, v in self._on_servers.items()}
            # Not traced by a call: TensorFlow counts those of all snapshots of a process together,
            # and warns of frequent ones.
            self._traced = self._traced or self._read.get_concrete_function()
            return self._traced() | others

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
            raise ConfigError(
                "A checkpoint cannot hold objects with savers of their own, which TensorFlow's "
                f"register_checkpoint_saver sets, got {', '.join(registered)}. Keep their values "
                "in attributes that are tf.Variable."
            )
        for part, tensors in gathered.items():
            # TensorFlow wraps variables of a strategy that it made itself, such as averages.
            variable = getattr(part, "obj", part)
            variable = variable.value if isinstance(variable, keras.Variable) else variable
            is_read_here = isinstance(variable, tf.Variable) and not _is_reduced(variable)
            for name, tensor in tensors.items():
                if is_read_here and is_on_server(variable):
                    self._on_servers[name] = variable
                elif is_read_here:
                    self._variables[name] = variable
                elif isinstance(part, WholeSlot):
                    self._slots[name] = part
                else:
                    self._others[name] = getattr(tensor, "tensor", tensor)


def _is_reduced(variable: tf.Variable) -> bool:
    """Returns whether a checkpoint saves a reduction over the replicas' copies."""
    return variable.synchronization == tf.VariableSynchronization.ON_READ


def digest_of(tensors: Mapping[str, tf.Tensor]) -> str:
    """Returns the SHA-256 over names and bytes of weights, slots, statistics and averages.

    Args:
      tensors: All tensors of a checkpoint by name, on the host.
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        if name.split("/")[0] not in _OTHERS:
            found.update(f"{name}\0".encode())
            found.update(_bytes_of(np.asarray(tensors[name].numpy())))
    return found.hexdigest()


def _bytes_of(value: np.ndarray) -> bytes:
    """Returns the bytes of an array: equal values have equal ones in every process."""
    if value.dtype.kind == "O":  # texts, of which an array holds addresses
        return repr(value.tolist()).encode()
    return np.ascontiguousarray(value).tobytes()
