"""Copies of the variables of a checkpoint on the host, and their assignment."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.checkpoints.contents import Value
from ddl.distribution.workers import Workers
from ddl.step.sharding.shares import copied_share, gathered

_ON_READ = tf.VariableSynchronization.ON_READ  # each replica has a value, and all are summed


class Snapshots:
    """Takes the values of variables, without copying those on the host.

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
    - Variables are read one by one: once a sparse update has touched one on a parameter server,
      its server copies it for the read, and must not hold copies of all its variables at once.
    - `take` returns when all copies are complete, so no later update runs beside them, and the
      snapshot shares no memory with variables on GPUs. ddl makes no further copy.

    TensorFlow's own asynchronous checkpoints fail with Keras 3 at the second save
    (tests/step/test_keras_canaries.py), and hold a second copy of every variable permanently.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Keeps the strategy of the variables."""
        self._strategy = strategy
        self._workers = Workers(strategy)
        self._gather: dict[str, Any] = {}

    def take(self, values: Iterable[Value], keeps: bool = True) -> dict[str, tf.Tensor]:
        """Returns the tensors by key, on the host. Eager, cross-replica context, on all workers.

        Slots in shares are gathered one by one, so that only the host holds all of them whole.

        Args:
          values: The values.
          keeps: Whether this worker needs the tensors; else it helps to gather and returns none.
        """
        taken = {}
        with tf.device("CPU:0"):
            for value in values:
                if value.whole is not None:
                    tensor = tf.constant(self._gathered(value, value.whole))
                elif keeps or getattr(value.variable, "synchronization", None) == _ON_READ:
                    tensor = tf.identity(value.variable)
                if keeps:
                    taken[value.key] = tensor
        return taken

    def _gathered(self, value: Value, whole: tf.TensorShape) -> np.ndarray:
        """Returns a slot whole, without padding."""
        variable, results = value.variable, self._strategy.experimental_local_results
        shape = tf.TensorShape([self._strategy.num_replicas_in_sync * variable.shape[0]])

        def gather() -> tf.Tensor:
            rows = self._strategy.run(lambda: gathered([variable.read_value()], [shape])[0])
            return results(rows)[0]

        if self._workers.number == 1:
            rows = np.concatenate([copy.numpy() for copy in results(variable)])
        else:
            if value.key not in self._gather:
                # Not traced by a call: TensorFlow counts those of all slots together, and warns.
                function = tf.function(gather, autograph=False)
                self._gather[value.key] = function.get_concrete_function()
            rows = self._gather[value.key]().numpy()
        return rows[: whole.num_elements()].reshape(whole)


def assign(
    values: Iterable[Value], reader: Any, strategy: tf.distribute.Strategy
) -> dict[str, tf.Tensor]:
    """Assigns the values of a checkpoint, one after the other. Eager, cross-replica context.

    Args:
      values: The values.
      reader: From `tf.train.load_checkpoint`; it holds the keys of all `values`.
      strategy: The strategy of the variables.

    Returns:
      Those of `values` that are tensors, by path.
    """
    workers, tensors = Workers(strategy), {}
    first, replicas = workers.index * workers.replicas_of_each, strategy.num_replicas_in_sync
    for value in values:
        with tf.device("CPU:0"):  # not whole on each device
            found = tf.constant(reader.get_tensor(value.key))
        if not isinstance(value.variable, tf.Variable):
            tensors[value.path] = tf.identity(found)
        elif value.whole is None:
            value.variable.assign(found, read_value=False)
        else:
            copies = strategy.experimental_local_results(value.variable)
            for number, copy in enumerate(copies, first):
                copy.assign(copied_share(found, number, replicas))
    return tensors


def digest_of(values: Iterable[tuple[str, np.ndarray]]) -> str:
    """Returns the SHA-256 over keys and bytes of weights, slots, statistics and averages.

    Args:
      values: Keys and values of a checkpoint. State and callbacks, which say where a run stands,
        count for nothing.
    """
    found = hashlib.sha256()
    for key, value in values:
        if not key.startswith(("callbacks/", "state/")):
            found.update(f"{key}\0".encode())
            is_text = value.dtype.kind == "O"  # an array of texts holds their addresses
            found.update(repr(value.tolist()).encode() if is_text else np.ascontiguousarray(value))
    return found.hexdigest()
