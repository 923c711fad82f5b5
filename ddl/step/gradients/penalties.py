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
    if all(variable.regularizer is None for variable in variables):
        return list(gradients)
    extra = of_penalties(variables)
    return [
        gradient if penalty is None else tf.convert_to_tensor(gradient) + penalty
        for gradient, penalty in zip(gradients, extra, strict=True)
    ]


def of_penalties(variables: Sequence[keras.Variable]) -> list[tf.Tensor | None]:
    """Returns the gradient of each variable's regularizer; None without one. Replica context.

    Args:
      variables: The variables, of which one or more have a regularizer.
    """
    regularized = [v for v in variables if v.regularizer is not None]
    with tf.GradientTape() as tape:
        penalties = [v.regularizer(v) for v in regularized]
        penalty = tf.add_n([tf.cast(p, widest(penalties)) for p in penalties])
    extra = iter(tape.gradient(penalty, [v.value for v in regularized]))
    return [next(extra) if variable.regularizer is not None else None for variable in variables]
