"""Gradients of the variables' own regularizers, such as L2."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from ddl.step.gradients.values import Gradient, widest


def add_regularization(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
) -> list[Gradient]:
    """Adds the gradients of the variables' own regularizers, such as L2. Replica context.

    These gradients depend only on the weights, so every replica computes them without an
    all-reduce. They are added once after the all-reduce, so their scale does not depend on the
    number of replicas or microbatches.
    """
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return list(gradients)
    with tf.GradientTape() as tape:
        penalties = [v.regularizer(v) for v in regularized]
        penalty = tf.add_n([tf.cast(p, widest(penalties)) for p in penalties])
    extra = iter(tape.gradient(penalty, [v.value for v in regularized]))
    return [
        tf.convert_to_tensor(gradient) + next(extra) if variable.regularizer else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
