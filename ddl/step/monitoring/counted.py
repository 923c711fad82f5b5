"""Norms of the gradients that an update has applied, as sums and counts for the state."""

from collections.abc import Mapping

import tensorflow as tf

from ddl.step.verbs.plan import StepPlan

# Sum and number of the norms of each optimizer, by its name. With norms of layers, each sum is a
# vector that begins with the global norm.
Norms = Mapping[str, tuple[tf.Tensor, tf.Tensor | int]]


def counted_norms(norms: Norms, plan: StepPlan, finite: tf.Tensor) -> tf.Tensor:
    """Returns sum and number of the global norms of each optimizer: float64 [2 · optimizers].

    Args:
      norms: The norms of an update.
      plan: The plan of the step.
      finite: Whether the update was made, bool [].
    """
    made = tf.cast(finite, tf.float64)
    counted: list[tf.Tensor] = []
    for name in plan.groups:
        norm, count = norms[name]
        norm = _unless_skipped(norm if norm.shape.rank == 0 else norm[0], plan, finite)
        once = isinstance(count, int) and count == 1
        counted += [norm, made if once else made * tf.cast(count, tf.float64)]
    return tf.stack(counted)


def norms_of_layers(norms: Norms, plan: StepPlan, finite: tf.Tensor) -> tf.Tensor:
    """Returns the sums and counts of the norms of layers, over all optimizers: float64 [n].

    Args:
      norms: The norms of an update.
      plan: The plan of the step.
      finite: Whether the update was made, bool [].
    """
    every = tf.add_n([norms[name][0][1:] for name in plan.groups])
    return _unless_skipped(every, plan, finite)


def _unless_skipped(values: tf.Tensor, plan: StepPlan, finite: tf.Tensor) -> tf.Tensor:
    """Returns values, or zeros if the update was undone; a change that is skipped has zeros."""
    return tf.where(finite, values, tf.zeros_like(values)) if plan.keeps_values else values
