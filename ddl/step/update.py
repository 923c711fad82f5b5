"""One update on every replica.

    replica         Σ loss·weight / B, backward     summed over the microbatches
    cross-replica   all-reduce (SUM) of gradients   once per update
                    strategy.reduce (SUM) of sums   Σ weight, Σ loss·weight, metrics
    cross-replica   finite?                         one check of the sum; if not, skip and undo
    replica         unscale, clip, apply            the same on every replica
    cross-replica   average of the weights          once per update that is not skipped

B is the global batch size. Padding and masks make Σ weight differ from B. After the all-reduce the
gradient is therefore multiplied by B / Σ weight, with Σ over the global batch. No replica needs
Σ weight before its backward pass, so no further communication is needed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from ddl.data import BatchPipeline
from ddl.data.pipeline import Batch
from ddl.errors import ConfigError
from ddl.optimizers.checks import refusing_reductions
from ddl.precision import LossScale
from ddl.step import gradients as gradient_path
from ddl.step.all_reduce import AllReduce
from ddl.step.moving_statistics import Statistics
from ddl.step.noise_scale import GradientNoiseScale, squared_norm_of
from ddl.step.objective import Objective
from ddl.step.onednn import in_own_graph
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.overflow import apply_unless_overflow, each_finite, next_scale
from ddl.step.state import TrainingState
from ddl.step.weight_average import WeightAverages

_Result = TypeVar("_Result")

_SUM = tf.distribute.ReduceOp.SUM


@dataclasses.dataclass(frozen=True)
class UpdateStep:
    """The update: maps a distributed batch and a state to the next state. Cross-replica context.

    Attributes:
      strategy: The strategy under which it runs.
      objective: The objective to minimize.
      optimizer: Prepared by `ddl.step.gradients.prepare_optimizer`.
      variables: The model's trainable variables.
      frozen: Variables of frozen layers. TensorFlow's tapes watch them, because Keras freezes a
        layer after making its variables.
      statistics: Variables that the forward pass changes; restored when an update is skipped.
      averages: Averages of the weights, moved by every update that is not skipped; None: none.
      pipeline: The pipeline of the batches; it sets the number of microbatches.
      clip_norm: Largest global norm of the reduced gradient, or None.
      clip_value: Largest absolute value of an entry of the reduced gradient, or None.
      loss_scale: Rule of the dynamic loss scale; None: no loss scaling.
      noise_scale: Estimator of the gradient noise scale; None: no estimate.
      all_reduce: Sums gradients over the replicas.

    Raises:
      ConfigError: If `clip_norm` or `clip_value` is not positive, if both are given, or if the
        noise scale cannot be estimated.
    """

    strategy: tf.distribute.Strategy
    objective: Objective
    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    frozen: list[keras.Variable]
    statistics: Statistics
    averages: WeightAverages | None
    pipeline: BatchPipeline
    clip_norm: float | None
    clip_value: float | None
    loss_scale: LossScale | None
    noise_scale: GradientNoiseScale | None
    all_reduce: AllReduce

    def __post_init__(self) -> None:
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"Trainer.{name} must be greater than 0, or None, got {limit}.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                f"clip_norm and clip_value exclude each other, got clip_norm = {self.clip_norm} "
                f"and clip_value = {self.clip_value}. Set one of them to None."
            )
        if self.noise_scale is not None:
            weights = "weight" in self.pipeline.source.element_spec or self.objective.task_weighs
            self.noise_scale.check(self._parts, weights_are_given=weights)

    @fixed_order_of_sums()
    def __call__(self, batch: Batch, state: TrainingState) -> TrainingState:
        """Makes one update and returns the next state. Cross-replica context, in a graph.

        Args:
          batch: The global batch number `state.batches`.
          state: The state before the update.

        Raises:
          ConfigError: If the task cannot be trained; while tracing.
        """
        statistics = [] if self.loss_scale is None else self.statistics.values()
        gradients, sums = self._accumulate(batch, state)
        sums = self.strategy.reduce(_SUM, sums, axis=None)
        gradients = self.all_reduce(gradients, self.variables)
        gradients = self._with_each_row_once(gradients)
        sums, noise = self._gradient_noise(sums, gradients, state)
        factor = self._factor(sums[0], state.loss_scale)

        def apply() -> tf.Tensor:
            with refusing_reductions(self.strategy):
                norms = self.strategy.run(self._replica_apply, args=(gradients, factor))
            if self.averages is not None:
                self.averages.update(state.step + 1)
            return self._of_first_replica(norms)

        if self.loss_scale is None:
            norm, finite = apply(), tf.constant(True)
        else:
            norm, finite = apply_unless_overflow(
                [self._of_first_replica(gradient) for gradient in gradients],
                apply,
                undo=lambda: self.statistics.restore(statistics),
            )
        return self._next_state(state, sums, norm, finite, noise)

    def in_own_graph_if_needed(self, function: Callable[[], _Result]) -> _Result:
        """Calls the body of a training loop, in a graph of its own if the model needs that.

        The graph holds the whole update, so that the all-reduce overlaps with the backward pass.
        With several microbatches, `_accumulate` instead puts each microbatch in its own graph.
        """
        if self.objective.needs_own_graph and self.pipeline.microbatches == 1:
            return in_own_graph(function)()
        return function()

    @property
    def changing_fields(self) -> list[str]:
        """Names of the state's fields that an update may change."""
        names = ["step", "batches", "sums", "diverged_for"]
        if self.clip_norm is not None:
            names.append("gradient_norms")
        if self.noise_scale is not None:
            names.append("gradient_noise")
        if self.loss_scale is not None:
            names += ["skipped_in_a_row", "loss_scale", "finite_updates"]
        return names

    def finite_gradients(self, batch: Batch, state: TrainingState) -> tf.Tensor:
        """Returns which gradients of each replica are finite before the all-reduce.

        Changes no variable. The arguments are those of `__call__`. Cross-replica context, in a
        graph.

        Returns:
          bool [replicas of this worker, variables].
        """
        statistics = self.statistics.values()
        gradients, _ = self._accumulate(batch, state)
        finite = self.strategy.run(each_finite, args=(gradients,))
        self.statistics.restore(statistics)
        return tf.stack(self.strategy.experimental_local_results(finite))

    def _accumulate(self, batch: Batch, state: TrainingState) -> tuple[Any, Any]:
        """Returns the replica-local gradients and metric sums of the batch, before any reduce."""

        def run(index: tf.Tensor | int, so_far: Any) -> Any:
            args = (batch, state.loss_scale, index, so_far)
            return self.strategy.run(self._replica_gradients, args=args)

        if self.pipeline.microbatches == 1:
            return run(0, None)
        if self.objective.needs_own_graph:
            run = in_own_graph(run)
        # The loop is outside strategy.run, so that layers can communicate across replicas in each
        # microbatch, as synchronized batch normalization does.
        _, accumulated = tf.while_loop(
            lambda index, so_far: index < self.pipeline.microbatches,
            lambda index, so_far: (index + 1, run(index, so_far)),
            (tf.constant(0), self.strategy.run(self._replica_zeros)),
        )
        return accumulated

    def _replica_zeros(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        size = self.objective.metrics.size + (self.noise_scale is not None)
        return [tf.zeros_like(v.value) for v in self.variables], tf.zeros([size], tf.float64)

    def _replica_gradients(
        self,
        batch: Batch,
        scale: tf.Tensor,
        index: tf.Tensor | int,
        so_far: tuple[list[tf.Tensor], tf.Tensor] | None,
    ) -> tuple[list[Any], tf.Tensor]:
        """Adds gradients and sums of microbatch `index` to `so_far`. Replica context."""
        features = self.pipeline.examples(batch, index)
        microbatch = self.pipeline.microbatch(batch, features, index, training=True)
        with tf.GradientTape() as tape, microbatch.forward():
            objective, sums = self.objective(features, training=True)
            if self.loss_scale is not None:
                objective *= tf.cast(scale, objective.dtype)
        others = self._left_out(tape.watched_variables())
        with microbatch.backward():
            gradients = tape.gradient(objective, [v.value for v in self.variables] + others)
        gradients, of_others = gradients[: len(self.variables)], gradients[len(self.variables) :]
        unused = [v.path for v, g in zip(self.variables, gradients, strict=True) if g is None]
        if unused:
            raise ConfigError(
                f"The loss does not depend on the trainable variables {', '.join(unused)}. Remove "
                "them from the model, or set trainable = False on their layers."
            )
        stay = [v.name for v, g in zip(others, of_others, strict=True) if g is not None]
        if stay:
            raise ConfigError(
                f"The loss depends on the trainable variables {', '.join(stay)}, which are not "
                "part of the task's model, so nothing updates them. Add their layers to the "
                "model, or keep them on an attribute of the task with trainable = False."
            )
        if self.noise_scale is not None:
            sums = tf.concat([sums, [squared_norm_of(gradients)]], axis=0)
        if so_far is None:
            return gradients, sums
        added = [total + gradient for total, gradient in zip(so_far[0], gradients, strict=True)]
        return added, so_far[1] + sums

    def _left_out(self, watched: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Returns the watched variables that are neither updated nor frozen. Replica context."""
        known = {id(v.value.handle) for v in (*self.variables, *self.frozen)}
        return [v for v in watched if id(v.handle) not in known]

    @property
    def _parts(self) -> int:
        """Parts of a global batch: replicas × microbatches."""
        return self.strategy.num_replicas_in_sync * self.pipeline.microbatches

    def _gradient_noise(
        self, sums: tf.Tensor, gradients: list[Any], state: TrainingState
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the metric sums alone, and the next averages of the gradient noise."""
        if self.noise_scale is None:
            return sums, state.gradient_noise
        batch = self.pipeline.global_batch_size
        parts = self._parts
        unscale = 1 / tf.cast(state.loss_scale, tf.float64) ** 2
        large = squared_norm_of([self._of_first_replica(gradient) for gradient in gradients])
        # A part's gradient is a sum over B/P examples divided by B, so 1/P of their mean. The mean
        # over P parts is s = P² · sums[-1] / P.
        small = parts * sums[-1]
        noise = self.noise_scale.next(
            state.gradient_noise, small * unscale, large * unscale, parts, batch
        )
        counts = tf.equal(sums[0], batch) & tf.reduce_all(tf.math.is_finite(noise))
        return sums[:-1], tf.where(counts, noise, state.gradient_noise)

    def _factor(self, weight: tf.Tensor, scale: tf.Tensor) -> tf.Tensor | None:
        """Returns B / (Σ weight · loss scale): float64 [], or None where it is always one."""
        weights_are_one = self.pipeline.always_full and not self.objective.task_weighs
        if weights_are_one and self.loss_scale is None:
            return None
        batch = tf.constant(self.pipeline.global_batch_size, tf.float64)
        return tf.math.divide_no_nan(batch, weight * tf.cast(scale, tf.float64))

    def _replica_apply(self, gradients: list[Any], factor: tf.Tensor | None) -> tf.Tensor:
        """Applies the reduced gradients and returns their global norm. Replica context."""
        if factor is not None:
            gradients = gradient_path.multiply(gradients, factor)
        gradients = gradient_path.add_regularization(gradients, self.variables)
        norm = tf.zeros([], tf.float64)
        if self.clip_norm is not None:
            gradients, norm = gradient_path.clip_by_global_norm(gradients, self.clip_norm)
        if self.clip_value is not None:
            gradients = gradient_path.clip_by_value(gradients, self.clip_value)
        # Not `apply`: a user's optimizer may override either, and `apply_gradients` calls `apply`.
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
        return tf.cast(norm, tf.float64)

    def _with_each_row_once(self, gradients: list[Any]) -> list[Any]:
        """Merges the duplicate rows of sparse gradients, before they are checked or applied."""
        first = map(self._of_first_replica, gradients)
        if not any(isinstance(gradient, tf.IndexedSlices) for gradient in first):
            return gradients
        return self.strategy.run(
            lambda own: [gradient_path.merge_duplicates(gradient) for gradient in own],
            args=(gradients,),
        )

    def _of_first_replica(self, value: Any) -> Any:
        return self.strategy.experimental_local_results(value)[0]

    def _next_state(
        self,
        state: TrainingState,
        sums: tf.Tensor,
        norm: tf.Tensor,
        finite: tf.Tensor,
        noise: tf.Tensor,
    ) -> TrainingState:
        made = tf.cast(finite, tf.int64)
        changes: dict[str, tf.Tensor] = {}
        if self.loss_scale is not None:
            changes |= next_scale(self.loss_scale, state, finite)
            sums = tf.where(finite, sums, tf.zeros_like(sums))
        if self.clip_norm is not None:
            counted = tf.stack([norm, tf.cast(made, tf.float64)])
            changes["gradient_norms"] = state.gradient_norms + counted
        if self.noise_scale is not None:
            changes["gradient_noise"] = noise
        sums = state.sums + sums  # once not finite, they stay so
        # Counted here and checked after the loop. If the loop ended at once, each update would
        # have to wait for the one before.
        diverged = tf.reduce_any(~tf.math.is_finite(sums))
        return state._replace(
            step=state.step + made,
            batches=state.batches + 1,
            sums=sums,
            diverged_for=state.diverged_for + tf.cast(diverged, tf.int64),
            **changes,
        )
