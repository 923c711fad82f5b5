"""One update on every replica, either applied completely or skipped.

    cross-replica   the step                        its gradients, each reduced once
    cross-replica   finite?                         one check of each sum
    replica         factor, penalties, clip, apply  the same on every replica
    cross-replica   average of the weights          once per update that is not skipped

The built-in step is `update.minimize(task.per_example, batch)`. It looks before it applies. A
task's `step` applies first, and all that it changed is restored if a gradient was not finite.

`TrainStep` makes an update of a batch; `ddl.Update` is the object by which a task's step makes it.
In an update, optimizers *apply* gradients, and averages *move*.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import ConfigError
from ddl.microbatch import without_traces_of_the_user
from ddl.optimizers.weight_average import WeightAverages
from ddl.precision import LossScale
from ddl.step.engine import BUILT_IN, Engine, StepPlan
from ddl.step.fixed_order import fixed_order_of_sums
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import trainable_variables
from ddl.step.metric_sums import SumsOfLosses
from ddl.step.overflow import KeptValues
from ddl.step.state import StepBatch, TrainingState
from ddl.step.update import FINITE, Results, Update
from ddl.tasks.parts import each_once, layers_of, own_variables_of
from ddl.tasks.task import Task, has_step


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Maps distributed batches and a state to the next state. Cross-replica context.

    Attributes:
      task: The task.
      plan: The plan of what the step computes and changes.
      gradient: Computes gradients of the global batch.
      optimizers: The optimizers by name, with their slots.
      statistics: Variables that layers write in their forward pass.
      averages: Averages of the weights, moved by every update that is not skipped; None: none.
      clips: Largest global norm of the gradients that each optimizer applies, or None, by its name
        in the step.
      loss_scale: Rule of the dynamic loss scale; None: no loss scaling.
    """

    task: Task
    plan: StepPlan
    gradient: GlobalGradient
    optimizers: Mapping[str, keras.optimizers.Optimizer]
    statistics: Sequence[tf.Variable]
    averages: WeightAverages | None
    clips: Mapping[str, float | None]
    loss_scale: LossScale | None

    @property
    def metrics(self) -> SumsOfLosses:
        """Layout of the metric sums."""
        return SumsOfLosses({n: loss.form.metrics for n, loss in self.plan.losses.items()})

    @property
    def changing_fields(self) -> list[str]:
        """Names of the state's fields that a loop carries; without a loss scale, `step` follows."""
        names = ["batches", "sums"]
        if any(clip is not None for clip in self.clips.values()):
            names.append("gradient_norms")
        if self.loss_scale is not None:
            names += ["step", "skipped_in_a_row", "loss_scale", "finite_updates"]
        return names

    @fixed_order_of_sums()
    @without_traces_of_the_user()
    def __call__(
        self, batches: Mapping[str, Batch], state: TrainingState
    ) -> tuple[TrainingState, tf.Tensor]:
        """Makes one update. Cross-replica context, in a graph.

        Args:
          batches: The batches of update `state.batches` of each source, by its name.
          state: The state before the update.

        Returns:
          The next state, and which of its sums are finite, bool [n].

        Raises:
          ConfigError: If the task cannot be trained; while tracing.
        """
        compiler = self.gradient.compiler

        def update() -> tuple[TrainingState, tf.Tensor]:
            results = self._update(batches, state)
            return compiler(lambda: self._next_state(state, results))

        return compiler.whole(lambda: compiler(update), update)

    def _update(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes an update, or restores all that it changed if a gradient overflows."""
        engine, reduced = Engine(self.plan, self.gradient, self.clips), None
        kept = KeptValues(self._at_risk() if self.loss_scale else [], self.gradient.strategy)
        if has_step(self.task):
            results = self._run_step(Update(self.task, engine, state, batches))
        else:
            variables, (optimizer,) = trainable_variables(self.task.model), self.plan.groups
            loss, batch = self.plan.losses[BUILT_IN], StepBatch("", 0, batches[""], state)
            reduced = self.gradient(loss, variables, batch, in_shares=True)
            results = {f"sums/{BUILT_IN}": reduced.sums}
            if reduced.finite is not None:
                results[FINITE] = reduced.finite

        def change() -> tf.Tensor:
            norm = tf.zeros([], tf.float64)
            if reduced is not None:
                norm = engine.apply(optimizer, variables, reduced.values, reduced.factor)
            if self.averages is not None:
                compiler = self.gradient.compiler
                self.averages.move(state.step + 1, compiler if compiler.is_on else None)
            return norm

        norm = kept.unless_overflow(results.get(FINITE), change)
        if reduced is not None:
            results[f"norms/{optimizer}"] = tf.stack([norm, tf.ones_like(norm)])
        return results

    def _run_step(self, update: Update) -> Results:
        """Runs the task's step, which applies its gradients; returns its results."""
        update.run()
        if update.calls != self.plan.calls:
            raise ConfigError(
                f"{type(self.task).__name__}.step calls other verbs than when the Trainer was made."
                " Leave out Python conditions on what changes, or use update.when."
            )
        return update.results

    def _at_risk(self) -> list[tf.Variable]:
        """Returns the variables that a step may change before all gradients are known.

        These are statistics and the task's own variables, and all variables if the task has a step:
        reading what it leaves unchanged copies nothing.
        """
        layers, every = layers_of(self.task), list(self.statistics)
        if has_step(self.task):
            holders = (*layers, *self.optimizers.values())
            every = [v.value for holder in holders for v in holder.variables]
        every += own_variables_of(self.task, layers)
        in_scope = self.gradient.strategy.extended.variable_created_in_scope
        return [variable for variable in each_once(every) if in_scope(variable)]

    def _next_state(
        self, state: TrainingState, results: Results
    ) -> tuple[TrainingState, tf.Tensor]:
        # A loss that is computed within `moved` alone has these sums.
        names, finite = self.plan.losses, results.get(FINITE)
        vector = self.metrics.joined(
            {n: results.get(f"sums/{n}", results.get(f"moved/{n}")) for n in names}
        )

        def unless_skipped(sums: tf.Tensor) -> tf.Tensor:
            return sums if finite is None else tf.where(finite, sums, tf.zeros_like(sums))

        updates = 1 if finite is None else tf.cast(finite, tf.int64)
        changed = {"batches": state.batches + 1, "step": state.step + updates}
        changed["sums"] = state.sums + unless_skipped(vector)
        if self.loss_scale is not None and finite is not None:
            scale, since = self.loss_scale.next(state.loss_scale, state.finite_updates, finite)
            in_a_row = tf.where(finite, tf.zeros([], tf.int64), state.skipped_in_a_row + 1)
            changed |= {"loss_scale": scale, "finite_updates": since, "skipped_in_a_row": in_a_row}
        if "gradient_norms" in self.changing_fields:
            nothing = tf.zeros([2], tf.float64)
            norms = tf.concat([results.get(f"norms/{n}", nothing) for n in self.plan.groups], 0)
            changed["gradient_norms"] = state.gradient_norms + unless_skipped(norms)
        return state._replace(**changed), tf.math.is_finite(changed["sums"])
