"""The gradient of the global batch in shares, which is reduced to each replica's share alone."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from ddl.step import gradients as gradient_path
from ddl.step.global_gradient import GlobalGradient
from ddl.step.objective import Objective
from ddl.step.reduced import Reduced
from ddl.step.sharding.in_shares import InShares
from ddl.step.sharding.optimizers import Sharding
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch


def gradient_in_shares(
    sharding: Sharding,
    gradient: GlobalGradient,
    objective: Objective,
    variables: Sequence[keras.Variable],
    batch: StepBatch,
    state: TrainingState,
    draws: int,
) -> Reduced:
    """Returns the gradient of an objective in shares. Cross-replica context, in a graph.

    Args:
      sharding: The shares.
      gradient: Computes the gradients of the replicas.
      objective: As in `GlobalGradient`, like all that follow.
      variables: The variables.
      batch: The global batch.
      state: The state before the update.
      draws: Number of the pass, which has random numbers of its own.

    Raises:
      ConfigError: As `GlobalGradient`.
    """
    gradients, sums = gradient.of_replicas(objective, variables, batch, state, draws)
    with tf.name_scope("ddl_all_reduce"):
        sums = gradient.all_reduce.of_sums(sums)
        shares = sharding.summed(gradients)
    finite = sharding.finite(shares) if gradient.scales else None
    widest = gradient_path.widest([variable.value for variable in variables])
    factor = gradient.factor(objective, batch, sums, state.loss_scale, widest)
    if factor is not None:
        shares = sharding.strategy.run(gradient_path.multiply, args=(shares, factor()))
    return Reduced(InShares(shares), finite, sums)
