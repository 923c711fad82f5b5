"""Metrics as sums and counts, which add up exactly over replicas, microbatches and steps.

Per-example values come in, weighted sums and the sum of weights go out, in float64: counts
are exact to 2^53 and a long run loses nothing to rounding.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf


def accuracy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """1.0 where the largest logit is the label's, else 0.0.

    Args:
      labels: integer [batch].
      logits: float [batch, classes].

    Returns:
      float32 [batch].
    """
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    return tf.cast(tf.equal(predicted, labels), tf.float32)


def top_k_accuracy(labels: tf.Tensor, logits: tf.Tensor, k: int) -> tf.Tensor:
    """1.0 where the label is among the `k` largest logits, else 0.0.

    A logit equal to the label's counts as larger, so that a model which gives all classes the
    same logit is not called right.

    Args:
      labels: integer [batch].
      logits: float [batch, classes].
      k: How many of the largest logits count.

    Returns:
      float32 [batch].
    """
    own = tf.gather(logits, labels, batch_dims=1)
    at_least = tf.reduce_sum(tf.cast(logits >= own[:, tf.newaxis], tf.int32), axis=-1)
    return tf.cast(at_least <= k, tf.float32)


class MetricSums:
    """The layout of a vector that holds Σ weight and Σ weight·value for each name.

    One vector is one tensor to reduce a step and one to fetch a loop.
    """

    def __init__(self, names: Sequence[str]):
        """Fixes the order of the names; slot 0 is the sum of weights."""
        self.names = tuple(names)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return 1 + len(self.names)

    def zeros(self) -> tf.Tensor:
        """The empty sums: float64 [size]."""
        return tf.zeros([self.size], tf.float64)

    def sums(self, values: Mapping[str, tf.Tensor], weight: tf.Tensor | None) -> tf.Tensor:
        """Sums of one replica's microbatch. Replica context.

        Args:
          values: float, one tensor of the shape of `weight` a name.
          weight: float [batch, …]; None if all are one.

        Returns:
          float64 [size].
        """
        of_names = [values[name] for name in self.names]
        if len({value.dtype for value in of_names}) > 1:
            of_names = [tf.cast(value, tf.float64) for value in of_names]
        rows = [tf.ones_like(of_names[0]), *of_names]
        products = tf.cast(tf.stack(rows), tf.float64)
        if weight is not None:
            # A row of weight zero is padding: whatever it holds, an infinity too, counts nothing.
            products = tf.math.multiply_no_nan(products, tf.cast(weight, tf.float64))
        return tf.reduce_sum(tf.reshape(products, [self.size, -1]), axis=1)

    def means(self, sums: tf.Tensor | np.ndarray) -> dict[str, float]:
        """Weighted means by name, as Python floats; NaN for each where no weight was seen."""
        vector = np.asarray(sums)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                name: float(np.divide(total, vector[0]))
                for name, total in zip(self.names, vector[1:], strict=True)
            }
