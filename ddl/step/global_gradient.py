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
from typing import Any

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.microbatch import Microbatch
from ddl.step import gradients as gradient_path
from ddl.step.accumulation import over_microbatches
from ddl.step.all_reduce import AllReduce
from ddl.step.compiled.compiler import Compiler
from ddl.step.compiled.deferred import Deferred
from ddl.step.moving_statistics import Statistics
from ddl.step.objective import Objective
from ddl.step.overflow import all_finite, multiply_finite
from ddl.step.reduced import Reduced
from ddl.step.remat import Parts
from ddl.step.rows.dense import dense_if_compiled
from ddl.step.rows.summing import added, gradient_sums, has_rows
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


@dataclasses.dataclass(frozen=True)
class GlobalGradient:
    """Computes gradients of the global batch. Cross-replica context, in a graph.

    Attributes:
      strategy: The strategy.
      compiler: Compiles what a replica computes of a microbatch, or not.
      pipelines: The pipeline of each source of batches, by its name; all have as many microbatches.
      all_reduce: Sums gradients over the replicas.
      scales: Whether losses are multiplied by the loss scale.
      statistics: Variables that a forward pass writes.
      moved_alone: The layers' moving moments, if each replica moves them by its own rows; None: by
        the rows of all replicas.
      own: Variables of a task with a step, outside of its layers, that no optimizer updates.
      complete: Variables on which a loss may depend besides those of its gradient: the frozen ones,
        or with a step of one's own all of the task's layers.
      remat: The parts of the models that the backward pass computes again, or None.
      by_rows: `id` of each variable of which the optimizer updates single rows.
    """

    strategy: tf.distribute.Strategy
    compiler: Compiler
    pipelines: Mapping[str, BatchPipeline]
    all_reduce: AllReduce
    scales: bool
    statistics: Statistics
    moved_alone: Statistics | None
    own: Sequence[tf.Variable]
    complete: Sequence[keras.Variable]
    remat: Parts | None
    by_rows: Container[int]

    def __call__(
        self,
        objective: Objective,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: int,
        each: OfExample | None = None,
    ) -> Reduced:
        """Returns the gradient of an objective with respect to variables.

        Args:
          objective: The objective.
          variables: The variables.
          batch: The global batch.
          state: The state before the update.
          draws: Number of the pass, which has random numbers of its own.
          each: Changes the gradients of each example before they are added up, or None.

        Raises:
          ConfigError: If the loss does not depend on a variable; while tracing.
        """
        gradients, sums = self.of_replicas(objective, variables, batch, state, draws, each)
        with tf.name_scope("ddl_all_reduce"):
            sums = self.all_reduce.of_sums(sums)
            gradients = self.all_reduce(gradients, variables)
        gradients = gradient_path.with_each_row_once(gradients, self.strategy)
        sums, examples = (sums, None) if each is None else (sums[:-1], sums[-1])
        widest = gradient_path.widest(list(map(self._of_first_replica, gradients)))
        factor = self.factor(objective, batch, sums, state.loss_scale, widest, examples)
        return Reduced(*self._multiplied(gradients, factor), sums=sums)

    def of_replicas(
        self,
        objective: Objective,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: int,
        each: OfExample | None = None,
    ) -> tuple[Any, Any]:
        """Returns gradients and metric sums of each replica before any reduce; see `__call__`."""
        if each is not None:
            check_no_gathers(objective.gathers)
            check_no_remat(self.remat is not None)
        tables = objective.tables if self.microbatches > 1 else {}
        form = gradient_sums(variables, tables, self.batch_size(batch), self.strategy)
        size = objective.metrics.size + (each is not None)

        def one(batch: StepBatch, index: tf.Tensor | int, so_far: Any) -> Any:
            values = self.of_microbatch(objective, variables, batch, state, index, draws, each)
            return values if self.microbatches == 1 else form.next(so_far, values)

        def zeros() -> tuple[list[Any], tf.Tensor]:
            return form.zeros(), tf.zeros([size], tf.float64)

        gradients, sums = self._over_microbatches(one, batch, zeros, objective.needs_own_graph)
        return form.as_gradients(gradients), sums

    def sums(
        self, objective: Objective, batch: StepBatch, state: TrainingState, draws: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the weighted sums of the losses of an objective over the examples.

        The arguments are those of `__call__`.

        Returns:
          The sums, float64 [entries of an example], and the sum of the weights, float64 [].
        """

        def one(batch: StepBatch, index: tf.Tensor | int, so_far: Any) -> Any:
            features, microbatch = self.examples(batch, index, state, draws)
            with microbatch.forward():
                weighed, _, sums, _ = objective.weighed(features, training=True)
            totals = tf.cast(tf.reduce_sum(weighed, axis=0), tf.float64)
            # The sum of weights counts each entry of an example.
            summed = tf.concat([sums[:1] / weighed.shape[1], totals], axis=0)
            return summed if so_far is None else so_far + summed

        zeros = lambda: tf.zeros([1 + objective.entries], tf.float64)  # noqa: E731
        summed = self._over_microbatches(one, batch, zeros, objective.needs_own_graph)
        total = self.all_reduce.of_sums(summed)
        return total[1:], total[0]

    def _over_microbatches(
        self,
        one: Callable[[StepBatch, Any, Any], Any],
        batch: StepBatch,
        zeros: Callable[[], Any],
        own_graph: bool,
    ) -> Any:
        """Returns the sum of a function of the microbatches, of each replica.

        Args:
          one: Takes the batch on a replica, the number of the microbatch and the sum so far, or
            None; returns the sum with that microbatch. Replica context.
          batch: The global batch.
          zeros: Returns the empty sum. Replica context.
          own_graph: Whether each microbatch needs a graph of its own (`ddl.step.onednn`).
        """

        def on_replica(own: Batch, place: tf.Tensor | int, index: Any, so_far: Any) -> Any:
            inside = None if has_rows(so_far) else so_far  # XLA takes no growing tensors
            values = self.compiler(lambda: one(StepBatch(batch.source, place, own), index, inside))
            return values if inside is so_far else added(so_far, values)

        def run(index: tf.Tensor | int, so_far: Any) -> Any:
            return self.strategy.run(on_replica, args=(batch.batch, batch.place, index, so_far))

        summed = over_microbatches(self.strategy, self.microbatches, run, zeros, own_graph)
        if self.moved_alone is not None:
            self.moved_alone.average(self.all_reduce)
        return summed

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a global batch."""
        return next(iter(self.pipelines.values())).microbatches

    def examples(
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

    def batch_size(self, batch: StepBatch) -> int:
        """Returns the number of rows of a global batch."""
        return self.pipelines[batch.source].global_batch_size

    def of_microbatch(
        self,
        objective: Objective,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        index: tf.Tensor | int,
        draws: int,
        each: OfExample | None,
    ) -> tuple[list[Any], tf.Tensor]:
        """Returns gradients and sums of microbatch `index`. Replica context."""
        features, microbatch = self.examples(batch, index, state, draws)
        tape = tf.GradientTape(persistent=each is not None)
        with tape, microbatch.forward(), tf.name_scope("ddl_forward"):
            if each is None:
                loss, sums = objective(features, training=True)
            else:
                loss, sums = losses_of_examples(objective, features)
            if self.scales:
                loss *= tf.cast(state.loss_scale, loss.dtype)
        watched = tape.watched_variables()
        others = gradient_path.left_out(watched, variables, self.own, self.complete)
        updated = [v.value for v in variables]
        with microbatch.backward(), tf.name_scope("ddl_backward"):
            if each is None:
                gradients = tape.gradient(loss, updated + others)
            else:
                scale, size = state.loss_scale, self.batch_size(batch)
                given = (tape, loss, microbatch.mask, updated, each, scale, size)
                gradients = sum_of_changed(*given)
                gradients += tape.gradient(loss, others) if others else []
        gradients, of_others = gradients[: len(variables)], gradients[len(variables) :]
        if self.microbatches == 1:
            gradients = dense_if_compiled(gradients, variables, self.by_rows)
        of_each = zip(variables, gradients, strict=True)
        gradient_path.check_used([v for v, g in of_each if g is None])
        gradient_path.check_none_left_out(others, of_others)
        return gradients, sums

    def factor(
        self,
        objective: Objective,
        batch: StepBatch,
        sums: tf.Tensor,
        scale: tf.Tensor,
        wide: Any,
        examples: tf.Tensor | None = None,
    ) -> Callable[[], tf.Tensor] | None:
        """Returns a function for B / (Σ weight · loss scale), []; None if always one.

        Float64, or float32 where that is exact enough for `wide`, the gradients' widest dtype.
        Σ weight is `sums[0]`, or with `each` the sum of the weights of the data, `examples`.
        """
        pipeline = self.pipelines[batch.source]
        # An example with several losses, as of tokens, weighs as many.
        weighs = examples is None and (objective.task_weighs or objective.entries > 1)
        weights_are_one = pipeline.always_full and not weighs
        if weights_are_one and not self.scales:
            return None
        if weights_are_one and wide.size <= scale.dtype.size:
            return lambda: tf.math.reciprocal(scale)

        def factor() -> tf.Tensor:
            size = tf.constant(pipeline.global_batch_size, tf.float64)
            weight = sums[0] if examples is None else examples
            return tf.math.divide_no_nan(size, weight * tf.cast(scale, tf.float64))

        return factor

    def _multiplied(
        self, gradients: list[Any], factor: Callable[[], tf.Tensor] | None
    ) -> tuple[list[Any] | Deferred, tf.Tensor | None]:
        """Returns gradients times a factor, and with a loss scale whether they were finite."""
        if factor is None:
            return gradients, None
        run, first = self.strategy.run, self._of_first_replica
        finite = None
        if self.compiler.is_on:
            if self.scales:
                of_each = run(lambda g: self.compiler(lambda: all_finite(g)), args=(gradients,))
                finite = first(of_each)
            return Deferred(self.strategy, gradients, factor), finite
        if self.scales and gradient_path.packs(self.strategy):
            values, of_each = run(multiply_finite, args=(gradients, factor()))
            return values, first(of_each)
        number = factor()
        if self.scales:
            finite = all_finite([first(gradient) for gradient in gradients])
        return run(gradient_path.multiply, args=(gradients, number)), finite

    def _of_first_replica(self, value: Any) -> Any:
        return self.strategy.experimental_local_results(value)[0]
