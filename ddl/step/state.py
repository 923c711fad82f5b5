"""The state between updates, and the batches by which a task's step names its data."""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import ConfigError


class TrainingState(NamedTuple):
    """The training state other than model and optimizer.

    The training loop carries it as tensors, so that reading it costs one fetch per loop.

    Attributes:
      step: int64 [], updates made.
      batches: int64 [], updates begun: the position in the data, of which an update may read
        several batches. It is ahead of `step` by the skipped updates and by `batches_left_out`.
      skipped_in_a_row: int64 [], updates skipped since the last one made.
      loss_scale: float32 [], 1 without loss scaling.
      finite_updates: int64 [], updates since the loss scale last changed.
      sums: float64 [n], metric sums since they were last read
        (`ddl.step.metric_sums.SumsOfLosses`).
      gradient_norms: float64 [2 · optimizers], sum and count of the global gradient norms of each
        optimizer since the last read; parameter groups count as one optimizer.
      diverged_for: int64 [], batches from the first with a loss that is not finite, inclusive; 0 if
        all losses are finite. With parameter servers a whole loop counts as one.
      batches_left_out: int64 [], with parameter servers, batches lost with a worker.
    """

    step: tf.Tensor
    batches: tf.Tensor
    skipped_in_a_row: tf.Tensor
    loss_scale: tf.Tensor
    finite_updates: tf.Tensor
    sums: tf.Tensor
    gradient_norms: tf.Tensor
    diverged_for: tf.Tensor
    batches_left_out: tf.Tensor

    @classmethod
    def initial(cls, loss_scale: float, sums: tf.Tensor, optimizers: int = 1) -> "TrainingState":
        """Returns the state before the first update.

        Args:
          loss_scale: Initial loss scale; 1 without loss scaling.
          sums: Empty metric sums, float64 [n].
          optimizers: Number of optimizers; parameter groups count as one.
        """
        zero = tf.zeros([], tf.int64)
        scale = tf.constant(loss_scale, tf.float32)
        pairs = tf.zeros([2 * optimizers], tf.float64)
        return cls(zero, zero, zero, scale, zero, sums, pairs, zero, zero)

    def without_metrics(self) -> "TrainingState":
        """Returns the state with metric sums and norms reset to zero."""
        norms = tf.zeros_like(self.gradient_norms)
        return self._replace(sums=tf.zeros_like(self.sums), gradient_norms=norms)


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """A global batch, as a step gets it and passes it to the verbs: a name for it, not its rows.

    Attributes:
      source: Name of its source; "" if the Trainer has a single one.
      number: Its number among the batches of the source that the update takes, from 0.
      of_update: The rows of all these batches (`ddl.data.batch.Batch`), distributed to replicas.
      state: The state before the update.
      pass_number: Number of the pass, over any batch, in the update; each pass draws random numbers
        of its own.
    """

    source: str
    number: int
    of_update: Batch
    state: TrainingState
    pass_number: int = 0

    def __getitem__(self, feature: Any) -> Any:
        """Raises ConfigError: a step cannot read examples itself."""
        raise ConfigError(
            f"A step cannot read batch[{feature!r}]: each replica has its own rows of the batch. "
            "Read the features in a loss, a method of (features, training) that returns a "
            "ddl.PerExample, and pass it: update.minimize(self.loss, batch)."
        )
