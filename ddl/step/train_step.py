"""One update on every replica, either applied completely or skipped.

    cross-replica   the step                        its gradients, each reduced and divided once
    cross-replica   finite?                         one check of each sum
    replica         penalties, clip, apply          the same on every replica
    cross-replica   average of the weights          once per update that is not skipped

The built-in step is `update.minimize(task.per_example, batch)`. It looks before it applies. A step
of the task's own applies first, and all that it changed is restored if a gradient was not finite.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.precision import LossScale
from ddl.step import gradients as gradient_path
from ddl.step.compiled import Compiler
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import Gradient, trainable_variables
from ddl.step.loss import Loss
from ddl.step.metric_sums import SumsOfLosses
from ddl.step.moving_statistics import Statistics
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.overflow import KeptValues, all_finite, unless_overflow
from ddl.step.planning import BUILT_IN, Plan, does_other_things
from ddl.step.sharding import Sharding, apply_to_shares
from ddl.step.state import Pass, Results, StepBatch, TrainingState
from ddl.step.update import Update
from ddl.step.weight_average import WeightAverages
from ddl.tasks.task import LossFunction, Task, has_step


class OptimizerPart(NamedTuple):
    """The part of a gradient that an optimizer updates.

    Attributes:
      optimizer: The optimizer.
      places: Places of its variables in the gradient.
      frozen_until: First step at which it updates its variables.
    """

    optimizer: keras.optimizers.Optimizer
    places: Sequence[int]
    frozen_until: int = 0

    def unless_frozen(self, step: tf.Tensor, update: Callable[[], Any]) -> None:
        """Calls a function that updates variables, unless frozen. Cross-replica context.

        Args:
          step: Number of updates made before this one, int64 [].
          update: The function.
        """
        if not self.frozen_until:
            update()
            return

        def updated() -> tf.Tensor:
            update()
            return tf.constant(True)

        tf.cond(step >= self.frozen_until, updated, lambda: tf.constant(False))


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The update: maps a distributed batch and a state to the next state. Cross-replica context.

    Attributes:
      task: The task.
      plan: The plan of what the step computes and changes.
      gradient: Computes gradients of the global batch.
      optimizers: The optimizers by name, with their slots.
      moving: Variables that the forward pass changes; restored when an update is skipped.
      averages: Averages of the weights, moved by every update that is not skipped; None: none.
      clips: Largest global norm of the gradients that each optimizer applies, or None, by its name
        in the step.
      loss_scale: Rule of the dynamic loss scale; None: no loss scaling.
    """

    task: Task
    plan: Plan
    gradient: GlobalGradient
    optimizers: Mapping[str, keras.optimizers.Optimizer]
    moving: Statistics
    averages: WeightAverages | None
    clips: Mapping[str, float | None]
    loss_scale: LossScale | None

    writes = True
    """Whether verbs write variables; a rehearsal writes none."""

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy under which it runs."""
        return self.gradient.strategy

    @property
    def compiler(self) -> Compiler:
        """Compiles its pieces, or not."""
        return self.gradient.compiler

    @property
    def sharding(self) -> Sharding | None:
        """The shares of the optimizers' slots; None: each replica holds whole slots."""
        return self.gradient.sharding

    @property
    def pipelines(self) -> Mapping[str, BatchPipeline]:
        """The pipeline of each source of batches, by its name; the first one counts epochs."""
        return self.gradient.pipelines

    @property
    def seed(self) -> int:
        """The seed of the random draws."""
        return next(iter(self.pipelines.values())).seed

    @property
    def optimizer_names(self) -> list[str]:
        """The names of the optimizers that a step can use."""
        return list(self.plan.groups)

    @property
    def statistics(self) -> Sequence[tf.Variable]:
        """Variables that the forward pass changes."""
        return self.moving.variables

    @property
    def metrics(self) -> SumsOfLosses:
        """Layout of the metric sums."""
        return SumsOfLosses({n: loss.training.metrics for n, loss in self.plan.losses.items()})

    @property
    def task_weighs(self) -> bool:
        """Whether a loss returns weights, so that Σ weight may differ from the batch size."""
        return any(loss.training.weighs for loss in self.plan.losses.values())

    @property
    def changing_fields(self) -> list[str]:
        """Names of the state's fields that an update may change."""
        names = ["step", "batches", "sums", "diverged_for"]
        if any(clip is not None for clip in self.clips.values()):
            names.append("gradient_norms")
        if self.loss_scale is not None:
            names += ["skipped_in_a_row", "loss_scale", "finite_updates"]
        return names

    @property
    def is_whole(self) -> bool:
        """Whether XLA compiles an update as one piece."""
        return self.compiler.is_whole

    @fixed_order_of_sums()
    def __call__(self, batches: Mapping[str, Batch], state: TrainingState) -> TrainingState:
        """Makes one update and returns the next state. Cross-replica context, in a graph.

        Args:
          batches: The batches of update `state.batches` of each source, by its name.
          state: The state before the update.

        Raises:
          ConfigError: If the task cannot be trained; while tracing.
        """

        def made() -> TrainingState:
            run = self._own_step if has_step(self.task) else self._built_in_step
            results = run(batches, state)
            return self.compiler(lambda: self._next_state(state, results))

        return self.compiler.whole(lambda: self.compiler(made), made) if self.is_whole else made()

    def _built_in_step(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes the built-in update, which changes nothing if a gradient overflows."""
        kept = None if self.loss_scale is None else KeptValues(self.statistics, self.strategy)
        variables = trainable_variables(self.task.model)
        made = Pass(StepBatch("", 0, batches[""]), state)
        reduced = self.gradient(self.plan.losses[BUILT_IN], variables, made, in_shares=True)
        (name,) = self.optimizer_names

        def change() -> tf.Tensor:
            norm = self.apply(name, variables, reduced.values, reduced.factor, state)
            self._move_averages(state)
            return norm

        if kept is None or reduced.finite is None:
            norm = change()
        else:
            norm = unless_overflow(self.strategy, reduced.finite, change, kept.restore)
        results = Results()
        results.finite, results.sums[BUILT_IN] = reduced.finite, reduced.sums
        results.norms[name] = tf.stack([norm, tf.ones_like(norm)])
        return results

    def _own_step(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes an update by the task's own step, and undoes it if a gradient overflowed."""
        kept = None
        if self.loss_scale is not None:
            kept = KeptValues(self.plan.written, self.strategy)
        update = Update(self, state, batches)
        update.run(self.task)
        if update.taken != self.plan.batches:
            raise does_other_things(f"reads the batches {update.taken}")
        results = update.results

        def keep() -> tf.Tensor:
            self._move_averages(state)
            return tf.zeros([], tf.float64)

        if kept is None or results.finite is None:
            keep()
        else:
            unless_overflow(self.strategy, results.finite, keep, kept.restore)
        return results

    def _next_state(self, state: TrainingState, results: Results) -> TrainingState:
        sums = results.sums_moved | results.sums
        vector = self.metrics.joined(sums)
        changed: dict[str, tf.Tensor] = {}
        finite = results.finite
        if self.loss_scale is None:
            changed["step"] = state.step + 1
        else:
            finite = tf.constant(True) if finite is None else finite
            changed["step"] = state.step + tf.cast(finite, tf.int64)
            vector = tf.where(finite, vector, tf.zeros_like(vector))
            scale, since = self.loss_scale.next(state.loss_scale, state.finite_updates, finite)
            changed |= {"loss_scale": scale, "finite_updates": since}
            in_a_row = state.skipped_in_a_row
            changed["skipped_in_a_row"] = tf.where(finite, tf.zeros_like(in_a_row), in_a_row + 1)
        if "gradient_norms" in self.changing_fields:
            nothing = tf.zeros([2], tf.float64)
            norms = tf.concat([results.norms.get(n, nothing) for n in self.optimizer_names], 0)
            if self.loss_scale is not None:
                norms = tf.where(finite, norms, tf.zeros_like(norms))
            changed["gradient_norms"] = state.gradient_norms + norms
        changed["sums"] = state.sums + vector
        # Checked after the loop: if it ended at once, each update would wait for the one before.
        batches, are_finite = state.batches + 1, tf.math.is_finite(changed["sums"])
        changed["diverged_for"] = tf.where(are_finite, batches, state.diverged_for)
        return state._replace(batches=batches, **changed)

    def _move_averages(self, state: TrainingState) -> None:
        if self.averages is not None:
            self.averages.update(state.step + 1, self.compiler)

    # ------------------------------------------------------------ for the verbs

    def loss(self, function: LossFunction, name: str, source: str, is_mean: bool) -> Loss:
        """Returns the loss of a name, for the function of this trace."""
        known = self.plan.means if is_mean else self.plan.losses
        if name not in known:
            raise does_other_things(f"uses the loss {name!r}")
        return known[name].of(function)

    def sums(self, loss: Loss, made: Pass) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the weighted sums of a function of the examples, and the sum of the weights."""
        return self.gradient.sums(loss, made)

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        """Returns whether values are finite, bool []; None without loss scaling."""
        if self.loss_scale is None:
            return None
        results = self.strategy.experimental_local_results
        return all_finite([results(value)[0] for value in values])

    def apply(
        self,
        optimizer: str,
        variables: Sequence[keras.Variable],
        values: Any,
        factor: tf.Tensor | None,
        state: TrainingState,
    ) -> tf.Tensor:
        """Applies a gradient: penalties → clipping → optimizers. Cross-replica context.

        Parameter groups share one gradient: penalties and clipping see all of it, and each
        optimizer then updates the variables of its group.

        Args:
          optimizer: Name of the optimizer in the step.
          variables: The variables.
          values: The gradient, one value for each; or in shares.
          factor: A factor that is missing in it, [], or None.
          state: The state before the update.

        Returns:
          The global norm before clipping, float64 []; 0 without a limit of the norm. Frozen parts
          do not count in it.
        """
        groups, clip, step = self.plan.groups[optimizer], self.clips[optimizer], state.step
        parts = [
            OptimizerPart(self.optimizers[name], places, groups[name].frozen_until)
            for name, places in self.plan.places(optimizer, variables).items()
        ]
        optimizers = [part.optimizer for part in parts]

        def clipped(own: list[Gradient], factor: tf.Tensor | None) -> tuple[Any, tf.Tensor]:
            if factor is not None:
                own = gradient_path.multiply(own, factor)
            own = gradient_path.add_regularization(own, variables)
            norm = tf.zeros([], tf.float64)
            if clip is not None:
                frozen = any(part.frozen_until for part in parts)
                squared = _squared_norm(own, parts, step) if frozen else None
                own, norm = gradient_path.clip_by_global_norm(own, clip, squared)
            return own, tf.cast(norm, tf.float64)

        def update(part: OptimizerPart, own: list[Gradient]) -> None:
            pairs = [(own[place], variables[place]) for place in part.places]
            # Not `apply`: a user's may override either, and `apply_gradients` calls `apply`.
            part.optimizer.apply_gradients(pairs)

        def clipped_and_applied(own: list[Gradient], factor: tf.Tensor | None) -> tf.Tensor:
            own, norm = clipped(own, factor)
            for part in parts:
                update(part, own)
            return norm

        def run(function: Callable[..., Any], *args: Any) -> Any:
            return self.strategy.run(
                lambda *own: self.compiler.of_update(lambda: function(*own), variables, optimizers),
                args=args,
            )

        with tf.name_scope("ddl_update"):
            if self.sharding is not None:
                return apply_to_shares(self.sharding, values, factor, variables, parts, clip, step)
            # `with_each_row_once` has merged the rows.
            with refusing_reductions(self.strategy), by_kernels(optimizers):
                if any(part.frozen_until for part in parts):
                    limited, norms = run(clipped, values, factor)
                    for part in parts:
                        part.unless_frozen(
                            step,
                            lambda part=part: run(lambda own: update(part, own), limited),  # type: ignore[misc]
                        )
                else:
                    norms = run(clipped_and_applied, values, factor)
            return self.strategy.experimental_local_results(norms)[0]


def _squared_norm(
    gradients: Sequence[Gradient], parts: Sequence[OptimizerPart], step: tf.Tensor
) -> tf.Tensor:
    """Returns the squared global norm of the parts that are not frozen. Replica context."""
    widest = gradient_path.widest(gradients)
    squares = []
    for part in parts:
        square = gradient_path.squared_norm([gradients[place] for place in part.places])
        is_active = tf.cast(step >= part.frozen_until, square.dtype)
        squares.append(tf.cast(tf.math.multiply_no_nan(square, is_active), widest))
    return tf.add_n(squares)
