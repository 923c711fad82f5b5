"""The gradient of a loss over the global batch, with the same bits on any devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.layers.shards import lockstep
from ddl.layers.shards.tree import sum_in_tree
from ddl.microbatch import Draws, Microbatch
from ddl.step import gradients as gradient_path
from ddl.step.accumulation import over_microbatches
from ddl.step.global_gradient import GlobalGradient
from ddl.step.objective import Objective
from ddl.step.reduced import Reduced
from ddl.step.shards.all_reduce import sum_over_replicas
from ddl.step.shards.checks import check_each, check_objectives, check_operations
from ddl.step.shards.packing import Layout
from ddl.step.shards.rows import rows_of
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import OfExample


def gradient_of(
    shards: int | None, objectives: Sequence[Objective], **fields: Any
) -> GlobalGradient:
    """Returns what computes gradients, with shards or without.

    Args:
      shards: `Trainer.batch_shards`.
      objectives: The objectives of the training.
      **fields: The attributes of `GlobalGradient`.

    Raises:
      ConfigError: With shards, if a layer or a loss would depend on the devices.
    """
    if shards is None:
        return GlobalGradient(**fields)
    check_objectives(objectives, fields["strategy"])
    return ShardedGradient(**fields, shards=shards)


@dataclasses.dataclass(frozen=True)
class ShardedGradient(GlobalGradient):
    """Computes gradients shard by shard; see `GlobalGradient` for the methods.

    A shard is a V-th of a microbatch. Each replica computes V/R consecutive shards. Every sum over
    rows of several shards is a binary tree of pairwise additions over the V shards.

    Attributes:
      shards: V.
    """

    shards: int = 1

    def __call__(
        self,
        objective: Objective,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: Draws,
        each: OfExample | None = None,
    ) -> Reduced:
        """See `GlobalGradient`."""
        check_each(each)
        layout = Layout.of(variables)
        packed = self._packed(objective, variables, batch, state, draws, layout)
        with tf.name_scope("ddl_all_reduce"):
            *buffers, sums = sum_over_replicas(self.strategy, packed)
        sums = self._of_first_replica(sums)
        gradients = self.strategy.run(layout.unpacked, args=(buffers,))
        wide = gradient_path.widest([self._of_first_replica(g) for g in gradients])
        factor = self.factor(objective, batch, sums, state.loss_scale, wide)
        return Reduced(*self._multiplied(gradients, factor), sums=sums, noise=None)

    def of_replicas(
        self,
        objective: Objective,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: Draws,
        each: OfExample | None = None,
    ) -> tuple[Any, Any]:
        """See `GlobalGradient`."""
        layout = Layout.of(variables)
        *buffers, sums = self._packed(objective, variables, batch, state, draws, layout)
        return self.strategy.run(layout.unpacked, args=(buffers,)), sums

    def sums(
        self, objective: Objective, batch: StepBatch, state: TrainingState, draws: Draws
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `GlobalGradient`."""

        def one(batch: StepBatch, index: tf.Tensor | int) -> list[tf.Tensor]:
            features, microbatch = self.examples(batch, index, state, draws)
            with microbatch.forward():
                weighed, _, sums, _ = objective.weighed(features, training=True)
            totals = tf.cast(tf.reduce_sum(weighed, axis=0), tf.float64)
            return [tf.concat([sums[:1] / weighed.shape[1], totals], axis=0)]

        zeros = [tf.TensorSpec([1 + objective.entries], tf.float64)]
        summed = self._over_shards(objective, batch, state, draws, one, zeros)
        (total,) = map(self._of_first_replica, sum_over_replicas(self.strategy, summed))
        return total[1:], total[0]

    def examples(
        self, batch: StepBatch, index: tf.Tensor | int, state: TrainingState, draws: Draws
    ) -> tuple[dict[str, tf.Tensor], Microbatch]:
        """Returns the examples of the current shard of microbatch `index`. Replica context."""
        shard = lockstep.current()
        if shard is None:
            return super().examples(batch, index, state, draws)
        features, of_replica = shard.given
        return rows_of(shard, features, of_replica, self.pipelines[batch.source].always_full)

    def _packed(
        self,
        objective: Objective,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: Draws,
        layout: Layout,
    ) -> list[Any]:
        """Returns the sum over the shards of each replica: gradients in buffers, metric sums."""

        def one(batch: StepBatch, index: tf.Tensor | int) -> list[tf.Tensor]:
            values = self.of_microbatch(objective, variables, batch, state, index, draws, None)
            gradients, sums = values
            return [*layout.packed(gradients), sums]

        zeros = [*layout.specs, tf.TensorSpec([objective.metrics.size], tf.float64)]
        return self._over_shards(objective, batch, state, draws, one, zeros)

    def _over_shards(
        self,
        objective: Objective,
        batch: StepBatch,
        state: TrainingState,
        draws: Draws,
        one: Callable[[StepBatch, Any], list[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
    ) -> list[Any]:
        """Returns the sums of a function over the shards and microbatches of each replica.

        Each shard has sums of its own until the last microbatch: the tree over the shards is the
        same for any number of replicas only if it comes last.

        Args:
          objective: The objective.
          batch: The global batch.
          state: The state before the update.
          draws: Identity of the pass's random numbers.
          one: Takes the batch on a replica and the number of the microbatch; returns the values of
            the current shard. Replica context.
          specs: Shapes and dtypes of these values.
        """
        count = self.shards // self.strategy.num_replicas_in_sync

        def on_replica(own: Any, place: tf.Tensor | int, index: Any, so_far: Any) -> Any:
            given = StepBatch(batch.source, place, own)
            whole = self.examples(given, index, state, draws)
            values = lockstep.over_shards(count, lambda: one(given, index), whole, check_operations)
            if so_far is None:
                return values
            return [
                [a + b for a, b in zip(*both, strict=True)]
                for both in zip(so_far, values, strict=True)
            ]

        def run(index: tf.Tensor | int, so_far: Any) -> Any:
            return self.strategy.run(on_replica, args=(batch.batch, batch.place, index, so_far))

        def zeros() -> list[list[tf.Tensor]]:
            return [[tf.zeros(spec.shape, spec.dtype) for spec in specs] for _ in range(count)]

        own_graph = objective.needs_own_graph
        of_shards = over_microbatches(self.strategy, self.microbatches, run, zeros, own_graph)
        return self.strategy.run(
            lambda own: [sum_in_tree(parts) for parts in zip(*own, strict=True)], args=(of_shards,)
        )
