"""Agreement between the processes that train together.

Each worker runs the whole program and holds a copy of all weights. Workers wait for each other's
updates, so they must agree here on each loop's length, where a run stops and what it resumes from.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.errors import DdlError

_SUMMING = "_ddl_summing"


class Workers:
    """The processes of a strategy: one, or those of a cluster. Eager, cross-replica context.

    All processes must call the same methods in the same order; the properties are local.

    Attributes:
      number: Number of processes.
      index: Index of this process, from 0.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Reads number and index from the strategy."""
        self._strategy, traits = strategy, traits_of(strategy)
        self.number, self.index = 1, 0
        if traits.several_processes and not traits.asynchronous:
            self.number = strategy.extended._num_workers
            self.index = strategy.extended._id_in_cluster

    @property
    def replicas_of_each(self) -> int:
        """Number of replicas per process."""
        return self._strategy.num_replicas_in_sync // self.number

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files that all share."""
        return self.index == 0

    def any(self, value: bool) -> bool:
        """Returns whether `value` is True on any process."""
        return bool(self._total([float(value)])[0])

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raises an error on all processes if the `with` block raises a DdlError on one.

        The block must not call methods of `Workers`.

        Raises:
          DdlError: The error of the block on this process, or one with the exit status of another
            process that failed.
        """
        failure: DdlError | None = None
        try:
            yield
        except DdlError as error:
            failure = error
        statuses = self.gather(np.array([failure.exit_status if failure else 0.0]))[:, 0]
        for worker in np.flatnonzero(statuses)[:1]:
            self.barrier()
            others = DdlError(
                f"Worker {worker} failed, so this worker ends, too. The output of worker {worker} "
                "shows the error: correct it, and start all workers again."
            )
            others.exit_status = int(statuses[worker])
            raise failure or others

    def barrier(self) -> None:
        """Waits for all processes, before an error that they all raise.

        A process may have the result of a collective while another still waits for it; if the first
        one ended now, it would abort the collective. After the barrier all processes have the
        result. If another process aborts the barrier, it is past it, so the error is suppressed.
        """
        with contextlib.suppress(tf.errors.OpError):
            self._total([0.0])

    def broadcast(self, value: int) -> int:
        """Broadcasts the chief's integer, of magnitude at most 2^53."""
        return int(self.broadcast_float(float(value)))

    def broadcast_float(self, value: float) -> float:
        """Broadcasts the chief's float64; the result is bitwise the same on all processes."""
        return float(self._total([value if self.is_chief else 0.0])[0])

    def gather_texts(self, text: str) -> list[str]:
        """Gathers the text of each process, in order of `index`."""
        own = np.frombuffer(text.encode(), np.uint8)
        lengths = self.gather(np.array([len(own)]))[:, 0].astype(int)
        rows = self.gather(np.pad(own, [0, lengths.max() - len(own)])).astype(np.uint8)
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Gathers a row [n] of each process into float64 [number, n]; n is the same on all."""
        matrix = np.zeros([self.number, len(values)])
        matrix[self.index] = values
        return self._total(matrix.ravel()).reshape(matrix.shape)

    def _total(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Sums values [n] over the processes: float64 [n]."""
        if self.number == 1:
            return np.asarray(values, np.float64)
        given = tf.constant(values, tf.float64)
        # Not traced by a call: TensorFlow counts those, and warns.
        total = _summing_of(self._strategy).get_concrete_function(given)
        return total(given).numpy() / self.replicas_of_each


def gatherable(values: tf.Tensor) -> tf.Tensor:
    """Returns values in a dtype that all workers can gather; cast back, they are the same."""
    if values.dtype.is_integer or values.dtype.is_bool:
        return tf.cast(values, tf.int64)
    return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values


def _summing_of(strategy: tf.distribute.Strategy) -> Any:
    """Returns the strategy's one function that sums over all replicas."""
    # The strategy itself holds it. A cache of this module would keep every strategy alive, also a
    # weak one, since the function refers to its strategy. It is traced once per shape, since
    # collectives need static shapes.
    if not hasattr(strategy, _SUMMING):

        @tf.function(autograph=False)
        def total(values: tf.Tensor) -> tf.Tensor:
            per_replica = strategy.run(tf.identity, args=(values,))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

        setattr(strategy, _SUMMING, total)
    return getattr(strategy, _SUMMING)
