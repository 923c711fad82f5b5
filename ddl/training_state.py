"""What changes from update to update, beside model and optimizer."""

from typing import NamedTuple

import tensorflow as tf


class TrainingState(NamedTuple):
    """What changes from update to update, beside model and optimizer.

    It travels through the training loop as tensors, so that reading it costs one fetch a loop.

    Attributes:
      step: int64 [], updates made.
      batches: int64 [], global batches consumed: the position in the data. It runs ahead of
        `step` by the updates that were skipped and the batches that were left out.
      skipped_in_a_row: int64 [], updates skipped since the last one made.
      loss_scale: float32 [], 1 where there is none.
      finite_updates: int64 [], updates since the loss scale last moved.
      sums: float64 [n], metric sums since they were last read (`ddl.metrics.MetricSums`).
      gradient_norms: float64 [2], Σ of the global gradient norms since then, and their count.
      diverged_for: int64 [], batches since the first loss that was not finite, with that one; 0
        as long as all were. With parameter servers a whole loop counts as one.
      rewinds: int64 [], how often training diverged and went back to a checkpoint.
      batches_left_out: int64 [], how many batches it did not see again then.
      gradient_noise: float64 [2], averages of |G|² and tr Σ (`ddl.noise_scale`), or zeros.
    """

    step: tf.Tensor
    batches: tf.Tensor
    skipped_in_a_row: tf.Tensor
    loss_scale: tf.Tensor
    finite_updates: tf.Tensor
    sums: tf.Tensor
    gradient_norms: tf.Tensor
    diverged_for: tf.Tensor
    rewinds: tf.Tensor
    batches_left_out: tf.Tensor
    gradient_noise: tf.Tensor

    @classmethod
    def initial(cls, loss_scale: float, sums: tf.Tensor) -> "TrainingState":
        """The state before the first update."""
        zero = tf.zeros([], tf.int64)
        scale = tf.constant(loss_scale, tf.float32)
        pair = tf.zeros([2], tf.float64)
        return cls(zero, zero, zero, scale, zero, sums, pair, zero, zero, zero, pair)

    def leaving_out(self, position: int, rewinds: int) -> "TrainingState":
        """The same state, to go on with batch `position` as after so many rewinds."""
        return self._replace(
            batches=tf.constant(position, tf.int64),
            batches_left_out=self.batches_left_out + position - self.batches,
            rewinds=tf.constant(rewinds, tf.int64),
        )

    def without_metrics(self) -> "TrainingState":
        """The same state with its metric sums started anew."""
        return self._replace(
            sums=tf.zeros_like(self.sums), gradient_norms=tf.zeros_like(self.gradient_norms)
        )
