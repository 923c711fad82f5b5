"""One update on every replica, either applied completely or skipped.

    cross-replica   the step                        its gradients, each reduced and divided once
    cross-replica   finite?                         one check of each sum; if not, skip and undo
    replica         clip, apply                     the same on every replica
    cross-replica   average of the weights          once per update that is not skipped

The built-in step is `update.minimize(task.per_example, batch)`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.precision import LossScale
from ddl.step.applying import OptimizerPart, apply
from ddl.step.compiled import Compiler
from ddl.step.effects import written_in
from ddl.step.global_gradient import GlobalGradient, Reduced
from ddl.step.loss import Loss
from ddl.step.metric_sums import SumsOfLosses
from ddl.step.moving_statistics import Statistics
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.overflow import KeptValues, all_finite, unless_overflow
from ddl.step.planning import BUILT_IN, Plan
from ddl.step.sharding import Sharding
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.update import Results, Update, run_own_step
from ddl.step.weight_average import WeightAverages
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, Task, has_step


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The update: maps a distributed batch and a state to the next state. Cross-replica context.

    Attributes:
      task: The task.
      plan: What the step computes and changes.
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
    """Whether verbs write variables (`ddl.step.verbs.update.Engine`)."""

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
        made = lambda: self._made(batches, state)  # noqa: E731
        return self.compiler.whole(lambda: self.compiler(made), made) if self.is_whole else made()

    def _made(self, batches: Mapping[str, Batch], state: TrainingState) -> TrainingState:
        """Makes the update of `__call__`, one replica's in one piece that XLA compiles."""
        if not has_step(self.task):
            results = self._built_in(batches, state)
        elif self.loss_scale is None:
            results = self._own(batches, state)
            self._move_averages(state)
        else:
            results = self._own_or_undone(batches, state)
        return self.compiler(lambda: self._next_state(state, results))

    def _built_in(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes the built-in update, which changes nothing if a gradient overflows."""
        kept = None
        if self.loss_scale is not None:
            kept = KeptValues(self.statistics, self.strategy)
        update = Update(self, state, batches)

        def step(update: Update, batch: StepBatch) -> None:
            gradients = update.gradients_to_apply(self.task.per_example, batch, BUILT_IN)

            def change() -> tf.Tensor:
                norm = self.apply(self.optimizer_names[0], gradients, state, in_branch=False)
                self._move_averages(state)
                return norm

            finite = update.results.finite
            if kept is None or finite is None:
                norm = change()
            else:
                norm = unless_overflow(self.strategy, finite, change, kept.restore)
            update.results.norms[self.optimizer_names[0]] = tf.stack([norm, tf.ones_like(norm)])

        return update.run(step)

    def _own(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes an update by the task's own step."""
        update = Update(self, state, batches)
        results = update.run(functools.partial(run_own_step, self.task))
        if update.batches.taken != self.plan.batches:
            raise ConfigError(
                f"{type(self.task).__name__}.step must read the same batches in each trace, got "
                f"{update.batches.taken}, and {dict(self.plan.batches)} when the Trainer was made. "
                "Call update.next as often each time."
            )
        return results

    def _own_or_undone(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes an update by the task's own step, and undoes it if a gradient overflowed.

        The step is traced as a function, which tells the variables to keep before it runs.
        """
        results = Results()

        @tf.function(autograph=False)
        def step() -> dict[str, Any]:
            return self._own(batches, state).tensors()

        traced = step.get_concrete_function()
        optimizers = self.optimizers.values()
        saved = [
            *(v.value for layer in layers_of(self.task) for v in layer.variables),
            *(v.value for one in optimizers for v in one.variables),
            *self.plan.own,
        ]
        kept = KeptValues(written_in(traced.graph, saved), self.strategy)
        results.add(traced())

        def keep() -> tf.Tensor:
            self._move_averages(state)
            return tf.zeros([], tf.float64)

        if results.finite is None:
            self._move_averages(state)
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
            scale = self.loss_scale.next(state.loss_scale, state.finite_updates, finite)
            changed["loss_scale"], changed["finite_updates"] = scale
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
        batches, all_finite = state.batches + 1, tf.math.is_finite(changed["sums"])
        changed["diverged_for"] = tf.where(all_finite, batches, state.diverged_for)
        return state._replace(batches=batches, **changed)

    def _move_averages(self, state: TrainingState) -> None:
        if self.averages is not None:
            self.averages.update(state.step + 1, self.compiler)

    # ------------------------------------------------------------ for the verbs

    def loss(self, function: LossFunction, name: str, source: str, is_mean: bool) -> Loss:
        """Returns the loss of a name, for the function of this trace."""
        known = self.plan.means if is_mean else self.plan.losses
        if name not in known:
            raise ConfigError(
                f"{type(self.task).__name__}.step uses the loss {name!r}, which it did not use "
                "when the Trainer was made. A step must call the same losses in each trace."
            )
        return known[name].of(function)

    def gradients(
        self,
        loss: Loss,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        state: TrainingState,
        draws: int,
        each: OfExample | None,
        alone: bool,
    ) -> Reduced:
        """Returns the gradient of a loss over the global batch."""
        return self.gradient(loss, variables, batch, state, draws, each, in_shares=alone)

    def sums(
        self, loss: Loss, batch: StepBatch, state: TrainingState, draws: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the weighted sums of a function of the examples, and the sum of the weights."""
        return self.gradient.sums(loss, batch, state, draws)

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        """Returns whether values are finite, bool []; None without loss scaling."""
        if self.loss_scale is None:
            return None
        results = self.strategy.experimental_local_results
        return all_finite([results(value)[0] for value in values])

    def apply(
        self, optimizer: str, gradients: Gradients, state: TrainingState, in_branch: bool
    ) -> tf.Tensor:
        """Applies gradients; returns their norm before clipping, float64 []."""
        groups = self.plan.groups[optimizer]
        parts = [
            OptimizerPart(self.optimizers[name], places, groups[name].frozen_until)
            for name, places in self.plan.places(optimizer, gradients.variables).items()
        ]
        with tf.name_scope("ddl_update"):
            return apply(
                *(self.strategy, gradients, parts, self.clips[optimizer]),
                *(state.step, self.compiler, self.sharding),
            )

    def note_average(self, targets: Sequence[tf.Variable]) -> None:
        """Does nothing: the rehearsal has noted them."""
