"""The gradient of the global batch in shares, which is reduced to each replica's share alone."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.data.pipeline import Batch
from ddl.microbatch import Draws
from ddl.step import gradients as gradient_path
from ddl.step.accumulation import over_microbatches
from ddl.step.global_gradient import GlobalGradient
from ddl.step.objective import Objective
from ddl.step.reduced import Reduced
from ddl.step.rows.summing import added
from ddl.step.sharding.in_shares import InShares
from ddl.step.sharding.optimizers import Sharding
from ddl.step.sharding.shares import size_of_share
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch


def gradient_in_shares(
    sharding: Sharding,
    gradient: GlobalGradient,
    objective: Objective,
    variables: Sequence[keras.Variable],
    batch: StepBatch,
    state: TrainingState,
    draws: Draws,
) -> Reduced:
    """Returns the gradient of an objective in shares. Cross-replica context, in a graph.

    Args:
      sharding: The shares.
      gradient: Computes the gradients of the replicas.
      objective: As in `GlobalGradient`, like all that follow.
      variables: The variables.
      batch: The global batch.
      state: The state before the update.
      draws: Identity of the pass's random numbers.

    Raises:
      ConfigError: As `GlobalGradient`.
    """
    given = (objective, variables, batch, state, draws)
    if sharding.each_microbatch and gradient.microbatches > 1 and not objective.gathers:
        shares, sums = _sums_of_shares(sharding, gradient, *given)
        with tf.name_scope("ddl_all_reduce"):
            sums = gradient.all_reduce.of_sums(sums)
    else:
        gradients, sums = gradient.of_replicas(*given)
        with tf.name_scope("ddl_all_reduce"):
            sums = gradient.all_reduce.of_sums(sums)
            shares = sharding.summed(gradients)
    sums, noise = gradient.gradient_noise(
        objective, sums, lambda: sharding.squared_norm(shares), batch, state
    )
    finite = sharding.finite(shares) if gradient.scales else None
    widest = gradient_path.widest([variable.value for variable in variables])
    factor = gradient.factor(objective, batch, sums, state.loss_scale, widest)
    if factor is not None:
        shares = sharding.strategy.run(gradient_path.multiply, args=(shares, factor()))
    return Reduced(InShares(shares), finite, sums, noise)


def _sums_of_shares(
    sharding: Sharding,
    gradient: GlobalGradient,
    objective: Objective,
    variables: Sequence[keras.Variable],
    batch: StepBatch,
    state: TrainingState,
    draws: Draws,
) -> tuple[list[Any], Any]:
    """Returns the gradients, reduced and added microbatch by microbatch, and metric sums.

    A replica holds the whole gradients of one microbatch alone. The metric sums are its own.
    """
    run, replicas = sharding.strategy.run, sharding.strategy.num_replicas_in_sync
    size = objective.metrics.size + (gradient.noise_scale is not None)

    def on_replica(own: Batch, place: Any, index: Any) -> tuple[list[Any], tf.Tensor]:
        given = StepBatch(batch.source, place, own)
        return gradient.compiler(
            lambda: gradient.of_microbatch(objective, variables, given, state, index, draws, None)
        )

    def one(index: Any, so_far: Any) -> Any:
        gradients, sums = run(on_replica, args=(batch.batch, batch.place, index))
        with tf.name_scope("ddl_all_reduce"):
            own = sharding.summed(gradients), sums
        return own if so_far is None else run(added, args=(so_far, own))

    def zeros() -> tuple[list[tf.Tensor], tf.Tensor]:
        values = [variable.value for variable in variables]
        shares = [tf.zeros([size_of_share(v.shape, replicas)], v.dtype) for v in values]
        return shares, tf.zeros([size], tf.float64)

    own_graph = objective.needs_own_graph
    return over_microbatches(sharding.strategy, gradient.microbatches, one, zeros, own_graph)
