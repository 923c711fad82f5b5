"""The gradient of one loss over the global batch.

    replica         Σ loss·weight / B, backward     summed over the microbatches
    cross-replica   all-reduce (SUM) of gradients   once per gradient
                    all-reduce (SUM) of sums        Σ weight, Σ loss·weight, metrics
    replica         times B / (Σ weight · loss scale)

B is the global batch size. Padding and masks make Σ weight differ from B. After the all-reduce the
gradient is therefore multiplied by B / Σ weight, with Σ over the global batch. No replica needs
Σ weight before its backward pass, so no further communication is needed.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.microbatch import Microbatch
from ddl.step import gradients as gradient_path
from ddl.step.accumulation import over_microbatches
from ddl.step.all_reduce import AllReduce
from ddl.step.compiled import Compiler
from ddl.step.loss import Loss
from ddl.step.moving_statistics import Statistics
from ddl.step.overflow import all_finite
from ddl.step.rows import added, dense_if_compiled, gradient_sums, has_rows
from ddl.step.sharding import InShares, Sharding
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import (
    OfExample,
    check_no_gathers,
    check_no_remat,
    losses_of_examples,
    sum_of_changed,
)
from ddl.tasks.gather import refuse_microbatches


class Reduced(NamedTuple):
    """A gradient of the global batch, with what was summed along with it.

    Attributes:
      values: The sum over the replicas, one per variable, equal on all replicas, or in shares.
      factor: The factor B / (Σ weight · loss scale) that is missing in the values, []; None: 1.
      finite: Whether all values are finite, bool []; None without loss scaling.
      sums: The loss's metric sums of the global batch, float64 [size of its `MetricSums`].
    """

    values: list[Any] | InShares
    factor: tf.Tensor | None
    finite: tf.Tensor | None
    sums: tf.Tensor


@dataclasses.dataclass(frozen=True)
class GlobalGradient:
    """Computes gradients of the global batch. Cross-replica context, in a graph.

    Attributes:
      strategy: The strategy.
      compiler: Compiles what a replica computes of a microbatch, or not.
      pipelines: The pipeline of each source of batches, by its name; all have as many microbatches.
      all_reduce: Sums gradients over the replicas.
      scales: Whether losses are multiplied by the loss scale.
      moved_alone: The layers' moving moments, if each replica moves them by its own rows; None: by
        the rows of all replicas.
      own: Variables of a task with a step, outside of its layers, that no optimizer updates.
      complete: Variables on which a loss may depend besides those of its gradient: the frozen ones,
        or with a step of one's own all of the task's layers.
      remat: Names of the layers that the backward pass computes again, by their ids; or None.
      by_rows: `id` of each variable of which the optimizer updates single rows.
      sharding: The shares of the optimizers' slots; None: each replica holds whole slots.
    """

    strategy: tf.distribute.Strategy
    compiler: Compiler
    pipelines: Mapping[str, BatchPipeline]
    all_reduce: AllReduce
    scales: bool
    moved_alone: Statistics | None
    own: Sequence[tf.Variable]
    complete: Sequence[keras.Variable]
    remat: Mapping[int, str] | None
    by_rows: Container[int]
    sharding: Sharding | None

    def __call__(
        self,
        loss: Loss,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: int,
        each: OfExample | None = None,
        *,
        in_shares: bool = False,
    ) -> Reduced:
        """Returns the gradient of a loss with respect to variables.

        Args:
          loss: The loss.
          variables: The variables.
          batch: The global batch.
          state: The state before the update.
          draws: Number of the pass, which has random numbers of its own.
          each: Changes the gradients of each example before they are added up, or None.
          in_shares: Whether each replica may get its share alone, if the slots are in shares.

        Raises:
          ConfigError: If the loss does not depend on a variable; while tracing.
        """
        gradients, sums = self.of_replicas(loss, variables, batch, state, draws, each)
        values: list[Any] | InShares
        with tf.name_scope("ddl_all_reduce"):
            sums = self.all_reduce.of_sums(sums)
            if in_shares and self.sharding is not None:
                shares = self.sharding.summed(gradients)
                finite = self.sharding.finite(shares) if self.scales else None
                values = InShares(shares)
            else:
                values = self.all_reduce(gradients, variables)
                values = gradient_path.with_each_row_once(values, self.strategy)
                finite = self._finite(values) if self.scales else None
        sums, examples = (sums, None) if each is None else (sums[:-1], sums[-1])
        widest = gradient_path.widest([variable.value for variable in variables])
        factor = self._factor(loss, batch, sums, state.loss_scale, widest, examples)
        return Reduced(values, factor, finite, sums)

    def of_replicas(
        self,
        loss: Loss,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: int,
        each: OfExample | None = None,
    ) -> tuple[Any, Any]:
        """Returns gradients and metric sums of each replica before any reduce; see `__call__`."""
        if each is not None:
            check_no_gathers(loss.training.gathers)
            check_no_remat(self.remat is not None)
        tables = loss.training.tables if self.microbatches > 1 else {}
        size = self.pipelines[batch.source].global_batch_size
        form = gradient_sums(variables, tables, size, self.strategy)
        length = loss.training.metrics.size + (each is not None)

        def one(batch: StepBatch, index: tf.Tensor | int, so_far: Any) -> Any:
            values = self._of_microbatch(loss, variables, batch, state, index, draws, each)
            return values if self.microbatches == 1 else form.next(so_far, values)

        def zeros() -> tuple[list[Any], tf.Tensor]:
            return form.zeros(), tf.zeros([length], tf.float64)

        gradients, sums = self._over_microbatches(one, batch, zeros)
        return form.as_gradients(gradients), sums

    def sums(
        self, loss: Loss, batch: StepBatch, state: TrainingState, draws: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the weighted sums of a loss over the examples; arguments as in `__call__`.

        Returns:
          The sums, float64 [entries of an example], and the sum of the weights, float64 [].
        """

        def one(batch: StepBatch, index: tf.Tensor | int, so_far: Any) -> Any:
            features, microbatch = self._examples(batch, index, state, draws)
            with microbatch.forward():
                weighed, _, sums, _ = loss.weighed(features, training=True)
            totals = tf.cast(tf.reduce_sum(weighed, axis=0), tf.float64)
            # The sum of weights counts each entry of an example.
            summed = tf.concat([sums[:1] / weighed.shape[1], totals], axis=0)
            return summed if so_far is None else so_far + summed

        zeros = lambda: tf.zeros([1 + loss.training.entries], tf.float64)  # noqa: E731
        summed = self._over_microbatches(one, batch, zeros)
        total = self.all_reduce.of_sums(summed)
        return total[1:], total[0]

    def _over_microbatches(
        self,
        one: Callable[[StepBatch, Any, Any], Any],
        batch: StepBatch,
        zeros: Callable[[], Any],
    ) -> Any:
        """Returns the sum of a function of the microbatches, of each replica.

        Args:
          one: Takes the batch on a replica, the number of the microbatch and the sum so far, or
            None; returns the sum with that microbatch. Replica context.
          batch: The global batch.
          zeros: Returns the empty sum. Replica context.
        """

        def on_replica(own: Batch, place: tf.Tensor | int, index: Any, so_far: Any) -> Any:
            inside = None if has_rows(so_far) else so_far  # XLA takes no growing tensors
            values = self.compiler(lambda: one(StepBatch(batch.source, place, own), index, inside))
            return values if inside is so_far else added(so_far, values)

        def run(index: tf.Tensor | int, so_far: Any) -> Any:
            return self.strategy.run(on_replica, args=(batch.batch, batch.place, index, so_far))

        summed = over_microbatches(self.strategy, self.microbatches, run, zeros)
        if self.moved_alone is not None:
            self.moved_alone.average()
        return summed

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a global batch."""
        return next(iter(self.pipelines.values())).microbatches

    def _examples(
        self, batch: StepBatch, index: tf.Tensor | int, state: TrainingState, draws: int
    ) -> tuple[dict[str, tf.Tensor], Microbatch]:
        """Returns the examples of microbatch `index`. Replica context."""
        pipeline, own = self.pipelines[batch.source], batch.batch
        features = pipeline.examples(own, index, batch.place)
        microbatch = pipeline.microbatch(
            own, features, index, training=True, step=state.step, draws=draws
        )
        microbatch.remat = self.remat
        microbatch.own_moments = self.moved_alone is not None
        if self.microbatches > 1:
            microbatch.gathering = refuse_microbatches
        return features, microbatch

    def _of_microbatch(
        self,
        loss: Loss,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        index: tf.Tensor | int,
        draws: int,
        each: OfExample | None,
    ) -> tuple[list[Any], tf.Tensor]:
        """Returns gradients and sums of microbatch `index`. Replica context."""
        features, microbatch = self._examples(batch, index, state, draws)
        tape = tf.GradientTape(persistent=each is not None)
        with tape, microbatch.forward(), tf.name_scope("ddl_forward"):
            if each is None:
                objective, sums = loss(features, training=True)
            else:
                objective, sums = losses_of_examples(loss, features)
            if self.scales:
                objective *= tf.cast(state.loss_scale, objective.dtype)
        watched = tape.watched_variables()
        others = gradient_path.left_out(watched, variables, self.own, self.complete)
        updated = [v.value for v in variables]
        with microbatch.backward(), tf.name_scope("ddl_backward"):
            if each is None:
                gradients = tape.gradient(objective, updated + others)
            else:
                scale = state.loss_scale
                size = self.pipelines[batch.source].global_batch_size
                given = (tape, objective, microbatch.mask, updated, each, scale, size)
                gradients = sum_of_changed(*given)
                gradients += tape.gradient(objective, others) if others else []
        gradients, of_others = gradients[: len(variables)], gradients[len(variables) :]
        if self.microbatches == 1:
            gradients = dense_if_compiled(gradients, variables, self.by_rows)
        of_each = zip(variables, gradients, strict=True)
        gradient_path.check_used([v for v, g in of_each if g is None])
        gradient_path.check_none_left_out(others, of_others)
        return gradients, sums

    def _factor(
        self,
        loss: Loss,
        batch: StepBatch,
        sums: tf.Tensor,
        scale: tf.Tensor,
        widest: tf.DType,
        examples: tf.Tensor | None,
    ) -> tf.Tensor | None:
        """Returns B / (Σ weight · loss scale), []; None if it is always one.

        Float64, or float32 where that is exact enough for the gradients' widest dtype. Σ weight is
        `sums[0]`, or with `each` the sum of the weights of the data, `examples`.
        """
        pipeline, form = self.pipelines[batch.source], loss.training
        # An example with several losses, as of tokens, weighs as many.
        weighs = examples is None and (form.weighs or form.entries > 1)
        weights_are_one = pipeline.always_full and not weighs
        if weights_are_one and not self.scales:
            return None
        if weights_are_one and widest.size <= scale.dtype.size:
            return tf.math.reciprocal(scale)
        size = tf.constant(pipeline.global_batch_size, tf.float64)
        weight = sums[0] if examples is None else examples
        return tf.math.divide_no_nan(size, weight * tf.cast(scale, tf.float64))

    def _finite(self, gradients: list[Any]) -> tf.Tensor:
        """Returns whether gradients that are equal on all replicas are finite, bool []."""
        first = self.strategy.experimental_local_results
        if not self.compiler.is_on:
            return all_finite([first(gradient)[0] for gradient in gradients])
        of_each = self.strategy.run(
            lambda own: self.compiler(lambda: all_finite(own)), args=(gradients,)
        )
        return first(of_each)[0]
