"""The gradient of one loss over the global batch.

    replica         Σ loss·weight / B, backward     summed over the microbatches
    cross-replica   all-reduce (SUM) of gradients   once per gradient
                    all-reduce (SUM) of sums        Σ weight, Σ loss·weight, metrics
    returned beside it                              factor B / (Σ weight · loss scale)

B is the global batch size. Padding and masks make Σ weight differ from B. After the all-reduce the
gradient is therefore multiplied by B / Σ weight, with Σ over the global batch, when it is applied
(`ddl.step.engine`) or returned (`Update.gradients`). No replica needs Σ weight before its backward
pass, so no further communication is needed.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.microbatch import Microbatch
from ddl.step import rows
from ddl.step.clipping import Variables, widest
from ddl.step.compiled import Compiler
from ddl.step.gradients import check_same_shapes
from ddl.step.loss import Features, Loss
from ddl.step.moving_statistics import average_over_replicas
from ddl.step.overflow import all_finite
from ddl.step.replicas import AllReduce, over_microbatches, sums_in_variables
from ddl.step.sharding import InShares, Sharding
from ddl.step.state import StepBatch
from ddl.tasks.gather import Gathered, MicrobatchesError
from ddl.tasks.task import has_step


class Reduced(NamedTuple):
    """A gradient of the global batch, with what was summed along with it.

    Attributes:
      values: The sum over the replicas, one per variable, equal on all replicas, or in shares.
      factor: The factor B / (Σ weight · loss scale) that is missing in the values, []; None: 1.
      finite: Whether all values are finite, bool []; None without loss scaling.
      sums: The loss's metric sums of the global batch, float64 [size of its `MetricSums`].
    """

    values: list[Any]
    factor: tf.Tensor | None
    finite: tf.Tensor | None
    sums: tf.Tensor


@dataclasses.dataclass(frozen=True)
class GlobalGradient:
    """Computes gradients of the global batch. Cross-replica context, in a graph.

    Attributes:
      strategy: The strategy.
      compiler: Compiles the pieces of the update, or not.
      pipelines: The pipeline of each source of batches, by its name; all have as many microbatches.
      all_reduce: Sums gradients over the replicas.
      scales: Whether losses are multiplied by the loss scale.
      local_moments: The layers' moving moments, if each replica moves them by the rows that it
        computes; None: by the rows of all replicas.
      may_depend_on: Variables on which a loss may depend besides those of its gradient: the frozen
        ones, or with a task's step all of its layers and optimizers.
      remat: Names of the layers that the backward pass computes again, by their ids; or None.
      by_rows: `id` of each variable of which the optimizer updates single rows.
      sharding: The shares of the optimizers' slots; None: each replica holds whole slots.
    """

    strategy: tf.distribute.Strategy
    compiler: Compiler
    pipelines: Mapping[str, BatchPipeline]
    all_reduce: AllReduce
    scales: bool
    local_moments: Sequence[tf.Variable] | None
    may_depend_on: Variables
    remat: Mapping[int, str] | None
    by_rows: Container[int]
    sharding: Sharding | None

    def __call__(
        self, loss: Loss, variables: Variables, batch: StepBatch, *, in_shares: bool = False
    ) -> Reduced:
        """Returns the gradient of a loss with respect to variables.

        Args:
          loss: The loss.
          variables: The variables.
          batch: The global batch, with the state before the update.
          in_shares: Whether the values may be in shares, if the optimizers' slots are.

        Raises:
          ConfigError: If the loss depends on variables that nothing updates; while tracing.
        """
        if loss.each is not None:
            self._check_each(loss)
        compute = functools.partial(self._of_microbatch, loss, variables, batch.state.loss_scale)
        entries = loss.form.metrics.size + (loss.each is not None)
        # The size of a sum of rows grows, which neither XLA nor a variable allows.
        grows = not self.compiler.is_on and not sums_in_variables(self.strategy)
        tables = loss.form.tables if grows and loss.each is None else {}
        empty = rows.empty_sums(variables, tables, self.strategy)
        gradients, sums = self._sums_of_replicas(compute, batch, entries, empty)
        with tf.name_scope("ddl_all_reduce"):
            sums = self.all_reduce.of_sums(sums)
            if in_shares and self.sharding is not None:
                values: list[Any] = self.sharding.summed(gradients)
            else:
                values = self.all_reduce(gradients, variables)
                values = rows.with_each_row_once(values, self.strategy)
            finite = self.finite(values)
        # With `each`, the sum of the weights of the data comes last.
        sums, weight = (sums, sums[0]) if loss.each is None else (sums[:-1], sums[-1])
        of_losses = loss.form.weighs or loss.form.entries > 1  # and not of examples
        is_of_data = loss.each is not None or not of_losses
        factor = self._factor(batch, weight, is_of_data, widest([v.value for v in variables]))
        return Reduced(values, factor, finite, sums)

    def sums(self, loss: Loss, batch: StepBatch) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the weighted sums of a loss over the examples; arguments as in `__call__`.

        Returns:
          The sums, float64 [entries of an example], and the sum of the weights, float64 [].
        """

        def compute(features: Features, microbatch: Microbatch) -> tuple[list[Any], tf.Tensor]:
            with microbatch.forward():
                weighed, sums, _ = loss.weighed(features, training=True)
            totals = tf.reshape(tf.cast(tf.reduce_sum(weighed, axis=0), tf.float64), [-1])
            # The sum of weights counts each entry of an example.
            return [], tf.concat([sums[:1] / loss.form.entries, totals], axis=0)

        _, total = self._sums_of_replicas(compute, batch, 1 + loss.form.entries)
        total = self.all_reduce.of_sums(total)
        return total[1:], total[0]

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        """Returns whether values, equal on all replicas or in shares, are finite, bool [].

        None without loss scaling.
        """
        if not self.scales:
            return None
        if isinstance(values, InShares) and self.sharding is not None:
            return self.sharding.finite(values)
        of_first = [self.strategy.experimental_local_results(value)[0] for value in values]
        return self.compiler(lambda: all_finite(of_first))

    def _sums_of_replicas(
        self,
        compute: Callable[[Features, Microbatch], Any],
        batch: StepBatch,
        entries: int,
        empty: Callable[[], list[Any]] = list,
    ) -> Any:
        """Returns gradients and vector of sums of each replica, before any reduce.

        Args:
          compute: Takes the examples of a microbatch and their `Microbatch`, and returns gradients
            and vector. Replica context.
          batch: The global batch.
          entries: Length of the vector.
          empty: Returns the empty sums of the gradients. Replica context.
        """

        def on_replica(of_update: Batch, index: tf.Tensor | int, so_far: Any) -> Any:
            def summed() -> Any:
                values = compute(*self._examples(batch, of_update, index))
                if so_far is None:
                    return values
                (earlier, total), (gradients, vector) = so_far, values
                return list(map(rows.added, earlier, gradients)), total + vector

            return self.compiler.of_pass(summed)

        def zeros() -> tuple[list[Any], tf.Tensor]:
            return empty(), tf.zeros([entries], tf.float64)

        summed = over_microbatches(
            self.strategy, self.microbatches, on_replica, batch.of_update, zeros
        )
        if self.microbatches > 1:  # the loop's tensors have no device: reduce would not pack them
            summed = self.strategy.run(tf.nest.map_structure, args=(tf.identity, summed))
        if self.local_moments is not None:
            average_over_replicas(self.local_moments, self.strategy)
        return summed

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a global batch."""
        return next(iter(self.pipelines.values())).microbatches

    def _examples(
        self, batch: StepBatch, of_update: Batch, index: Any
    ) -> tuple[Features, Microbatch]:
        """Returns a microbatch's examples of this replica, by its number. Replica context."""
        pipeline = self.pipelines[batch.source]
        features = pipeline.examples(of_update, index, batch.number)
        given = {"step": batch.state.step, "pass_number": batch.pass_number, "training": True}
        microbatch = pipeline.microbatch(of_update, features, index, **given)
        microbatch.remat = self.remat
        microbatch.own_moments = self.local_moments is not None
        if self.microbatches > 1:
            microbatch.gathering = _refuse
        return features, microbatch

    def _of_microbatch(
        self,
        loss: Loss,
        variables: Variables,
        scale: Any,
        features: Features,
        microbatch: Microbatch,
    ) -> tuple[list[Any], tf.Tensor]:
        """Returns gradients and sums of a microbatch. Replica context."""
        tape = tf.GradientTape(persistent=loss.each is not None)
        with tape, microbatch.forward(), tf.name_scope("ddl_forward"):
            compute = loss if loss.each is None else loss.of_examples
            objective, sums = compute(features, training=True)
            if self.scales:
                objective *= tf.cast(scale, objective.dtype)
        known = {id(v.value.handle) for v in (*variables, *self.may_depend_on)}
        others = [v for v in tape.watched_variables() if id(v.handle) not in known]
        updated = [v.value for v in variables]
        with microbatch.backward(), tf.name_scope("ddl_backward"):
            if loss.each is None:
                gradients = tape.gradient(objective, updated + others)
            else:
                gradients = _sum_of_changed(loss, tape, objective, updated, microbatch.mask, scale)
                gradients += tape.gradient(objective, others) if others else []
        gradients, of_others = gradients[: len(variables)], gradients[len(variables) :]
        gradients = rows.dense_where_sparse_saves_nothing(gradients, variables, self.by_rows)
        if stay := [v.name for v, g in zip(others, of_others, strict=True) if g is not None]:
            raise ConfigError(
                f"{loss.where} depends on the trainable variables {', '.join(stay)}, which nothing "
                "updates. Add their layers to the task's model, pass them to update.minimize in a "
                "`step`, or set trainable = False on them."
            )
        unused = [v.path for v, g in zip(variables, gradients, strict=True) if g is None]
        if unused and not has_step(loss.task):
            raise ConfigError(
                f"{loss.where} does not depend on the trainable variables {', '.join(unused)}. "
                "Remove them from the model, or set trainable = False on their layers."
            )
        pairs = zip(updated, gradients, strict=True)
        return [tf.zeros_like(v) if g is None else g for v, g in pairs], sums

    def _factor(
        self, batch: StepBatch, weight: tf.Tensor, is_of_data: bool, dtype: tf.DType
    ) -> tf.Tensor | None:
        """Returns B / (Σ weight · loss scale), []; None if it is always one.

        Args:
          batch: The global batch.
          weight: Its Σ weight, float64 [].
          is_of_data: Whether these weights are those of the data, none of the task's.
          dtype: The gradients' widest dtype. The factor is float32 where that is exact enough for
            it, else float64.
        """
        pipeline, scale = self.pipelines[batch.source], batch.state.loss_scale
        weights_are_one = pipeline.always_full and is_of_data
        if weights_are_one and not self.scales:
            return None
        if weights_are_one and dtype.size <= scale.dtype.size:
            return tf.math.reciprocal(scale)
        size = tf.constant(pipeline.global_batch_size, tf.float64)
        return tf.math.divide_no_nan(size, weight * tf.cast(scale, tf.float64))

    def _check_each(self, loss: Loss) -> None:
        """Raises ConfigError if a gradient is not that of one example, or would take too long."""
        where, kind = "update.gradients with `each`", keras.layers.BatchNormalization
        if loss.form.gathers or any(isinstance(layer, kind) for layer in loss.form.layers):
            raise ConfigError(
                f"{where} does not go with BatchNormalization or ddl.gather, since the gradient of "
                "an example must be its own. Use GroupNormalization, and compute each loss from "
                "its example."
            )
        if self.remat is not None:
            raise ConfigError(
                f"{where} does not go with Trainer.remat, which would compute the layers again for "
                "each example. Leave it out, and raise accumulation_steps to need less memory."
            )


def _refuse(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    """Refuses `ddl.gather` (`Microbatch.gathering`) in a loss that gathered in no probe."""
    raise MicrobatchesError("The loss calls ddl.gather, which needs the whole global batch")


def _sum_of_changed(
    loss: Loss,
    tape: tf.GradientTape,
    losses: tf.Tensor,
    variables: Sequence[tf.Variable],
    mask: tf.Tensor | None,
    scale: tf.Tensor,
) -> list[tf.Tensor | None]:
    """Returns Σ each(∇ loss of an example), divided and scaled. Replica context.

    The forward pass is that of the whole microbatch, so random draws and masks are as usual. The
    backward pass runs for all examples at once, by `tf.vectorized_map`.
    """
    used = tape.gradient(losses, variables)
    connected = [place for place, gradient in enumerate(used) if gradient is not None]
    if not connected:
        return used
    finite = all_finite([tf.convert_to_tensor(used[place]) for place in connected])

    def of_row(row: tf.Tensor) -> list[tf.Tensor]:
        one = tf.one_hot(row, losses.shape[0], dtype=losses.dtype)
        gradients = tape.gradient(losses, [variables[place] for place in connected], one)
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        changed = loss.each([g / tf.cast(scale, g.dtype) for g in gradients])
        check_same_shapes("`each` of update.gradients", changed, gradients)
        return [g if mask is None else tf.where(mask[row], g, tf.zeros_like(g)) for g in changed]

    # An operation that cannot be vectorized runs in a loop over the rows.
    changed = tf.vectorized_map(of_row, tf.range(losses.shape[0]), warn=False)
    sums: list[tf.Tensor | None] = [None] * len(variables)
    for place, values in zip(connected, changed, strict=True):
        total = tf.reduce_sum(values, axis=0) * (
            tf.cast(scale, values.dtype) / loss.global_batch_size
        )
        # `each` may hide an overflow, such as by tf.clip_by_value.
        sums[place] = tf.where(finite, total, tf.cast(np.nan, total.dtype))
    return sums
