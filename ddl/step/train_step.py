"""One update on every replica, either applied completely or skipped.

    cross-replica   the step                        its gradients, each reduced once
    cross-replica   finite?                         one check of each sum
    replica         factor, penalties, clip, apply  the same on every replica
    cross-replica   average of the weights          once per update that is not skipped

The built-in step is `update.minimize(task.per_example, batch)`. It looks before it applies. A step
of the task's own applies first, and all that it changed is restored if a gradient was not finite.

An *update* is what a `TrainStep` makes of a batch, and the object by which a task's own step makes
it. In an update, optimizers *apply* gradients, and averages *move*.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import ConfigError
from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.optimizers.weight_average import WeightAverages
from ddl.precision import LossScale
from ddl.step import gradients as gradient_path
from ddl.step.fixed_order import fixed_order_of_sums
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import Gradient, Variables, trainable_variables
from ddl.step.metric_sums import SumsOfLosses
from ddl.step.overflow import KeptValues
from ddl.step.planning import BUILT_IN, Part, Plan
from ddl.step.sharding import apply_to_shares
from ddl.step.state import Pass, StepBatch, TrainingState
from ddl.step.update import FINITE, Update
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import Task, has_step

Results = dict[str, tf.Tensor]
"""Figures of an update by name (`ddl.step.update.Update.results`)."""

Made = tuple[Results, Callable[[], tf.Tensor]]
"""Results of a step, and a function that applies what waits for the check for an overflow."""


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Maps distributed batches and a state to the next state. Cross-replica context.

    Attributes:
      task: The task.
      plan: The plan of what the step computes and changes.
      gradient: Computes gradients of the global batch.
      optimizers: The optimizers by name, with their slots.
      moving: Variables that the forward pass changes.
      averages: Averages of the weights, moved by every update that is not skipped; None: none.
      clips: Largest global norm of the gradients that each optimizer applies, or None, by its name
        in the step.
      loss_scale: Rule of the dynamic loss scale; None: no loss scaling.
    """

    task: Task
    plan: Plan
    gradient: GlobalGradient
    optimizers: Mapping[str, keras.optimizers.Optimizer]
    moving: Sequence[tf.Variable]
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

        def made() -> tuple[TrainingState, tf.Tensor]:
            results = self._results(batches, state)
            return compiler(lambda: self._next_state(state, results))

        return compiler.whole(lambda: compiler(made), made)

    def _results(self, batches: Mapping[str, Batch], state: TrainingState) -> Results:
        """Makes an update, or restores all that it changed if a gradient overflows."""
        is_own = has_step(self.task)
        changed = self._every_variable() if is_own else self._written()
        kept = KeptValues(changed if self.loss_scale else [], self.gradient.strategy)
        compiler = self.gradient.compiler
        step = self._own_step if is_own else self._built_in_step
        results, apply = step(batches, state)

        def change() -> tf.Tensor:
            norm = apply()
            if self.averages is not None:
                self.averages.move(state.step + 1, compiler if compiler.is_on else None)
            return norm

        norm = kept.unless_overflow(results.get(FINITE), change)
        if not is_own:
            (name,) = self.plan.groups
            results[f"norms/{name}"] = tf.stack([norm, tf.ones_like(norm)])
        return results

    def _every_variable(self) -> list[tf.Variable]:
        """Returns all that a step can change: reading what it leaves alone copies nothing."""
        layers = layers_of(self.task)
        of_keras = [v.value for x in (*layers, *self.optimizers.values()) for v in x.variables]
        extended = self.gradient.strategy.extended
        every = {id(v): v for v in [*of_keras, *own_variables_of(self.task, layers)]}
        return [v for v in every.values() if extended.variable_created_in_scope(v)]

    def _written(self) -> list[tf.Variable]:
        """Returns what a forward pass can write: statistics, and variables of the task's own."""
        own = own_variables_of(self.task, layers_of(self.task))
        made = self.gradient.strategy.extended.variable_created_in_scope
        return [*self.moving, *(v for v in own if made(v))]

    def _built_in_step(self, batches: Mapping[str, Batch], state: TrainingState) -> Made:
        """Computes the gradient of the built-in step, and leaves it to be applied."""
        variables, (name,) = trainable_variables(self.task.model), self.plan.groups
        made = Pass(StepBatch("", 0, batches[""]), state)
        reduced = self.gradient(self.plan.losses[BUILT_IN], variables, made, in_shares=True)
        results = {f"sums/{BUILT_IN}": reduced.sums}
        if reduced.finite is not None:
            results[FINITE] = reduced.finite
        return results, lambda: self.apply(name, variables, reduced.values, reduced.factor)

    def _own_step(self, batches: Mapping[str, Batch], state: TrainingState) -> Made:
        """Runs the task's own step, which leaves nothing to be applied."""
        update = Update(self, state, batches)
        update.run()
        if update.calls != self.plan.calls:
            raise ConfigError(
                f"{type(self.task).__name__}.step calls other verbs than when the Trainer was made."
                " Leave out Python conditions on what changes, or use update.when."
            )
        return update.results, lambda: tf.zeros([], tf.float64)

    def _next_state(
        self, state: TrainingState, results: Results
    ) -> tuple[TrainingState, tf.Tensor]:
        # A loss that is computed within `moved` alone has these sums.
        names, finite = self.plan.losses, results.get(FINITE)
        vector = self.metrics.joined(
            {n: results.get(f"sums/{n}", results.get(f"moved/{n}")) for n in names}
        )

        def if_made(sums: tf.Tensor) -> tf.Tensor:
            return sums if finite is None else tf.where(finite, sums, tf.zeros_like(sums))

        made = 1 if finite is None else tf.cast(finite, tf.int64)
        changed = {"batches": state.batches + 1, "step": state.step + made}
        changed["sums"] = state.sums + if_made(vector)
        if self.loss_scale is not None and finite is not None:
            scale, since = self.loss_scale.next(state.loss_scale, state.finite_updates, finite)
            in_a_row = tf.where(finite, tf.zeros([], tf.int64), state.skipped_in_a_row + 1)
            changed |= {"loss_scale": scale, "finite_updates": since, "skipped_in_a_row": in_a_row}
        if "gradient_norms" in self.changing_fields:
            nothing = tf.zeros([2], tf.float64)
            norms = tf.concat([results.get(f"norms/{n}", nothing) for n in self.plan.groups], 0)
            changed["gradient_norms"] = state.gradient_norms + if_made(norms)
        return state._replace(**changed), tf.math.is_finite(changed["sums"])

    def apply(self, optimizer: str, variables: Variables, values: Any, factor: Any) -> tf.Tensor:
        """Applies a gradient: penalties → clip → optimizers. Cross-replica context, in a graph.

        Parameter groups share one gradient: penalties and clipping see all of it, and each
        optimizer then updates the variables of its group.

        Args:
          optimizer: Name of the optimizer in the step.
          variables: The variables.
          values: The gradient, one value for each; or in shares.
          factor: A factor that is missing in it, [], or None.

        Returns:
          The global norm before clipping, float64 []; 0 without a limit of the norm.
        """
        gradient, clip = self.gradient, self.clips[optimizer]
        every = (self.plan.applied[group] for group in self.plan.groups[optimizer])
        parts = [part for part in every if part.places(variables)]
        optimizers = [part.optimizer for part in parts]

        def on_replica(own: Any, factor: Any) -> tf.Tensor:
            piece = functools.partial(_apply, own, factor, variables, parts, clip)
            return gradient.compiler.of_update(piece, variables, optimizers)

        with tf.name_scope("ddl_update"):
            if gradient.sharding is not None:
                return apply_to_shares(gradient.sharding, values, factor, variables, parts, clip)
            with refusing_reductions(gradient.strategy), by_kernels(optimizers):
                norms = gradient.strategy.run(on_replica, args=(values, factor))
            return gradient.strategy.experimental_local_results(norms)[0]


def _apply(
    own: list[Gradient], factor: Any, variables: Variables, parts: list[Part], clip: float | None
) -> tf.Tensor:
    """Applies a gradient that all replicas hold; returns its norm, as `apply`. Replica context."""
    if factor is not None:
        own = gradient_path.multiply(own, factor)
    own = gradient_path.add_regularization(own, variables)
    norm = tf.zeros([], tf.float64)
    if clip is not None:
        squared = gradient_path.squared_norm(own)
        own, norm = gradient_path.clip_by_global_norm(own, clip, squared)
    for part in parts:
        pairs = [(own[place], variables[place]) for place in part.places(variables)]
        # Not `apply`: a user's may override either, and `apply_gradients` calls `apply`.
        part.optimizer.apply_gradients(pairs)
    return tf.cast(norm, tf.float64)
