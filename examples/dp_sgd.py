"""Differentially private SGD (Abadi et al. 2016) of a task that has a model and a loss."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class DpSgd:
    """Clips the gradient of each example, and adds noise to their sum.

    The privacy that a run spends follows from `noise`, the batch size and the number of updates;
    an accountant computes it. Accountants assume that a batch is drawn at random. ddl shuffles
    instead, as most implementations do.
    """

    def __init__(self, task: ddl.Task, limit: float = 1.0, noise: float = 1.0) -> None:
        """`noise` is the standard deviation of the noise of the sum, as a multiple of `limit`."""
        self.task, self.model, self.limit, self.noise = task, task.model, limit, noise

    def check(self, source: ddl.data.Source) -> None:
        """Lets the wrapped task check its data."""
        if check := getattr(self.task, "check", None):
            check(source)

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The loss of the wrapped task, which also defines evaluation."""
        return self.task.per_example(features, training)

    def clipped(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Limits the norm of one example's gradient."""
        norm = tf.linalg.global_norm(gradients)
        factor = tf.minimum(tf.ones_like(norm), self.limit / norm)
        return [gradient * factor for gradient in gradients]

    def one(self, features: dict[str, Any], training: bool) -> tf.Tensor:
        """Counts the examples: padding has weight 0."""
        return tf.ones([features["image"].shape[0]], keras.config.floatx())

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates the weights by the noisy mean of the clipped gradients."""
        gradients = update.gradients(self.per_example, batch, each=self.clipped)
        deviation = self.noise * self.limit / update.sum(self.one, batch)

        def noisy(gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
            noise = ddl.random.normal(self, gradient.shape)
            return gradient + tf.cast(deviation, gradient.dtype) * tf.cast(noise, gradient.dtype)

        update.apply(gradients.map(noisy))
