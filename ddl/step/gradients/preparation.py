"""Optimizers made ready for reduced gradients, and checks of the variables that they update."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.checks import check_optimizer, check_unused
from ddl.step.gradients.values import Gradient


def prepare_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> None:
    """Builds the optimizer's slots and removes the all-reduce from its `apply`.

    Keras's `apply` sums gradients over the replicas, without an option to skip it. This function
    replaces the instance's hook for the all-reduce by the identity. The hook is private to Keras
    and checked by tests/step/test_gradients.py.

    Args:
      optimizer: The optimizer; changed in place.
      variables: The trained variables.
      strategy: The strategy in whose scope the optimizer was made.

    Raises:
      ConfigError: If `check_optimizer` or `check_unused` rejects the optimizer, or if it was made
        outside the strategy's scope.
    """
    check_optimizer(optimizer)
    if not strategy.extended.variable_created_in_scope(optimizer.iterations.value):
        raise ConfigError(
            f"The optimizer {optimizer.name!r} was created outside the strategy's scope. Create it "
            "under `with strategy.scope():`, like the model."
        )
    check_unused(optimizer, variables)
    with strategy.scope():
        optimizer.build(variables)
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def check_used(unused: Sequence[keras.Variable]) -> None:
    """Raises ConfigError if there are trainable variables on which the loss does not depend."""
    if unused:
        raise ConfigError(
            "The loss does not depend on the trainable variables "
            f"{', '.join(v.path for v in unused)}. Remove them from the model, or set trainable = "
            "False on their layers."
        )


def left_out(
    watched: Sequence[tf.Variable],
    variables: Sequence[keras.Variable],
    own: Sequence[tf.Variable],
    complete: Sequence[keras.Variable],
) -> list[tf.Variable]:
    """Returns the watched variables that are neither updated nor frozen. Replica context.

    Args:
      watched: Variables that a loss reads.
      variables: Variables that are updated.
      own: As in `GlobalGradient`, like `complete`.
      complete: See `own`.

    Raises:
      ConfigError: If a loss of a step reads a trainable variable that nothing updates.
    """
    of_task = {id(v.handle) for v in own}
    if stay := [v.name for v in watched if id(v.handle) in of_task]:
        raise ConfigError(
            f"A loss reads the trainable variables {', '.join(stay)} of the task, but the step "
            "does not update them. Pass them to update.minimize as keras.Variable, or make them "
            "with trainable=False."
        )
    known = {id(v.value.handle) for v in (*variables, *complete)}
    return [v for v in watched if id(v.handle) not in known]


def check_none_left_out(
    others: Sequence[tf.Variable], gradients: Sequence[Gradient | None]
) -> None:
    """Raises ConfigError if the loss has gradients of variables that nothing updates."""
    stay = [v.name for v, g in zip(others, gradients, strict=True) if g is not None]
    if stay:
        raise ConfigError(
            f"The loss depends on the trainable variables {', '.join(stay)}, which are not "
            "part of the task's model, so nothing updates them and no checkpoint holds them. Add "
            "their layers to the model, or keep them on an attribute of the task: with trainable "
            "= False, or in a task with a `step` that passes their model to update.minimize."
        )
