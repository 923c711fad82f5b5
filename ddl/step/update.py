"""One update on every replica, either applied completely or skipped.

    cross-replica   the step                        its gradients, each reduced and divided once
    cross-replica   finite?                         one check of each sum; if not, skip and undo
    replica         clip, apply                     the same on every replica
    cross-replica   average of the weights          once per update that is not skipped

The built-in step is `update.minimize(task.per_example, batch)`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.precision import LossScale
from ddl.step.compiled.compiler import Compiler
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import packs
from ddl.step.metric_sums import SumsOfLosses
from ddl.step.moving_statistics import Statistics
from ddl.step.observing import observe
from ddl.step.order_of_sums import fixed_order_of_sums
from ddl.step.overflow import Changes, KeptValues, all_finite, change_unless_overflow
from ddl.step.reduced import Reduced
from ddl.step.sharding import Sharding
from ddl.step.sharding.gradient import gradient_in_shares
from ddl.step.state import TrainingState
from ddl.step.verbs.applying import OptimizerPart, apply
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.plan import StepPlan
from ddl.step.verbs.update import Update
from ddl.step.verbs.values import Summed, Values
from ddl.step.verbs.work import Books
from ddl.step.weight_average import WeightAverages
from ddl.tasks.task import LossFunction


@dataclasses.dataclass(frozen=True)
class UpdateStep:
    """The update: maps a distributed batch and a state to the next state. Cross-replica context.

    Attributes:
      plan: The step, and what it computes and changes.
      gradient: Computes gradients of the global batch.
      optimizers: The optimizers by name, prepared by `ddl.step.gradients.prepare_optimizer`.
      statistics: Variables that the forward pass changes; restored when an update is skipped.
      averages: Averages of the weights, moved by every update that is not skipped; None: none.
      clips: Largest global norm of the gradients that each optimizer applies, or None, by its name
        in the step.
      loss_scale: Rule of the dynamic loss scale; None: no loss scaling.
      sharding: The shares of the optimizers' slots; None: each replica holds whole slots.
    """

    plan: StepPlan
    gradient: GlobalGradient
    optimizers: Mapping[str, keras.optimizers.Optimizer]
    statistics: Statistics
    averages: WeightAverages | None
    clips: Mapping[str, float | None]
    loss_scale: LossScale | None
    sharding: Sharding | None = None

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy under which it runs."""
        return self.gradient.strategy

    @property
    def compiler(self) -> Compiler:
        """Compiles its pieces, or not."""
        return self.gradient.compiler

    @property
    def pipelines(self) -> Mapping[str, BatchPipeline]:
        """The pipeline of each source of batches, by its name; the first one counts epochs."""
        return self.gradient.pipelines

    @property
    def metrics(self) -> SumsOfLosses:
        """Layout of the metric sums."""
        return SumsOfLosses({name: loss.metrics for name, loss in self.plan.losses.items()})

    @property
    def task_weighs(self) -> bool:
        """Whether a loss returns weights, so that Σ weight may differ from the batch size."""
        return any(loss.task_weighs for loss in self.plan.losses.values())

    @property
    def kept_variables(self) -> list[tf.Variable]:
        """Variables whose values an update keeps, to restore them if it is skipped."""
        if self.loss_scale is None:
            return []
        kept = self.statistics.variables + self.plan.to_restore(self.optimizers)
        return list({id(variable): variable for variable in [*kept, *self.plan.frozen]}.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept values on each replica that an update changes."""
        frozen = set(map(id, self.plan.frozen))
        changed = [v for v in self.kept_variables if id(v) not in frozen]
        return sum(v.shape.num_elements() * v.dtype.size for v in changed)

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

    @property
    def is_whole(self) -> bool:
        """Whether XLA compiles an update as one piece."""
        return self.compiler.is_whole

    def _made(self, batches: Mapping[str, Batch], state: TrainingState) -> TrainingState:
        """Makes the update of `__call__`, one replica's in one piece that XLA compiles."""
        observe("update")
        work = _Work(self, state)
        update = Update(work, state, batches, self.plan.only_moved)
        update.run(self.plan.run)
        self.plan.check_trace([call.identity for call in update.calls], update.batches.taken)
        work.finish(update.books)
        return self.compiler(lambda: self._next_state(state, update.books))

    @property
    def needs_own_graph(self) -> bool:
        """Whether a loop runs each update in a graph of its own: the all-reduce overlaps there.

        With several microbatches, `GlobalGradient` instead puts each microbatch in its own graph.
        """
        of_any = any(one.needs_own_graph for one in self.plan.objectives)
        return of_any and self.gradient.microbatches == 1

    @property
    def changing_fields(self) -> list[str]:
        """Names of the state's fields that an update may change."""
        names = ["step", "batches", "sums", "diverged_for"]
        if any(clip is not None for clip in self.clips.values()):
            names.append("gradient_norms")
        if self.loss_scale is not None:
            names += ["skipped_in_a_row", "loss_scale", "finite_updates"]
        return names

    def _next_state(self, state: TrainingState, books: Books) -> TrainingState:
        norms = None
        if "gradient_norms" in self.changing_fields:
            norms = functools.partial(_counted_norms, books.norms, self.plan)
        changes = Changes(self.metrics.joined(books.sums), norms)
        if self.loss_scale is None:
            changed = changes.made(state)
        elif books.finite is not None and packs(self.strategy) and not self.compiler.is_on:
            changed = changes.by_branch(state, books.finite, self.loss_scale)
        else:
            finite = tf.constant(True) if books.finite is None else books.finite
            changed = changes.by_selection(state, finite, self.loss_scale)
        # Checked after the loop: if it ended at once, each update would wait for the one before.
        batches, finite = state.batches + 1, tf.math.is_finite(changed["sums"])
        return state._replace(
            batches=batches,
            diverged_for=tf.where(finite, batches, state.diverged_for),
            **changed,
        )


def _counted_norms(
    norms: Mapping[str, tuple[tf.Tensor, tf.Tensor | int]], plan: StepPlan, finite: tf.Tensor
) -> tf.Tensor:
    """Returns sum and number of the global norms of each optimizer: float64 [2 · optimizers].

    Args:
      norms: Sum and number of the norms of each optimizer in an update, by its name.
      plan: The plan of the step.
      finite: Whether the update was made, bool [].
    """
    made = tf.cast(finite, tf.float64)
    counted: list[tf.Tensor] = []
    for name in plan.groups:
        norm, count = norms[name]
        if plan.keeps_values:  # else a change that is skipped has the norm 0
            norm = tf.where(finite, norm, tf.zeros_like(norm))
        once = isinstance(count, int) and count == 1
        counted += [norm, made if once else made * tf.cast(count, tf.float64)]
    return tf.stack(counted)


class _Work:
    """The work of one update, for its verbs (`ddl.step.verbs.work.Work`)."""

    def __init__(self, update: UpdateStep, state: TrainingState):
        self.strategy = update.strategy
        self.seed: int | None = next(iter(update.pipelines.values())).seed
        self._update = update
        self._plan = update.plan
        self._state = state
        self._functions: dict[str, LossFunction] = {}
        self._kept: KeptValues | None = None
        self._sharding: Sharding | None = None  # where gradients are reduced to shares
        if update.loss_scale is not None:
            self._kept = KeptValues(update.kept_variables, self.strategy)

    def name_of_loss(self, loss: LossFunction, name: str | None, source: str) -> str:
        name = self._plan.name_of_loss(loss, name)
        if name not in {**self._plan.losses, **self._plan.means}:
            raise ConfigError(
                f"{type(self._plan.task).__name__}.step uses the loss {name!r}, which it did not "
                "use when the Trainer was made. A step must call the same losses in each trace."
            )
        self._functions[name] = loss
        return name

    def name_of_optimizer(self, name: str | None) -> str:
        return self._plan.name_of_optimizer(name)

    def model(self, given: Any) -> Any:
        return self._plan.model(given)

    def gradients(
        self,
        loss: str,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        draws: int,
        each: OfExample | None,
    ) -> Reduced:
        observe("gradients", loss=loss)
        objective = self._plan.losses[loss].of(self._functions[loss])
        given = (objective, variables, batch, self._state, draws)
        if self._sharding is not None:
            reduced = gradient_in_shares(self._sharding, self._update.gradient, *given)
        else:
            reduced = self._update.gradient(*given, each)
        observe("reduced", variables=variables, reduced=reduced)
        return reduced

    @contextmanager
    def applied_alone(self) -> Iterator[None]:
        self._sharding = self._update.sharding
        yield
        self._sharding = None

    def sums(self, name: str, values: Values, batch: StepBatch, draws: int) -> Summed:
        observe("gradients", loss=name)
        objective = self._plan.means[name].of(values)
        sums, weight = self._update.gradient.sums(objective, batch, self._state, draws)
        observe("summed", loss=name, value=sums)
        traced = objective.loss  # an equal function of the planning trace, or `values`
        assert isinstance(traced, Values)
        return Summed(tf.reshape(sums, traced.shape), weight, traced.dtype)

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        if self._kept is None:
            return None
        results = self.strategy.experimental_local_results
        return all_finite([results(value)[0] for value in values])

    def keep_statistics(self) -> KeptValues:
        return self._update.statistics.kept()

    def apply(self, optimizer: str, gradients: Gradients) -> tf.Tensor:
        observe("apply", optimizer=optimizer, gradients=gradients)
        update = self._update
        parts = self._plan.parts(optimizer, gradients.variables)
        used = [
            OptimizerPart(update.optimizers[name], places, self._plan.frozen_until(name))
            for name, places in parts.items()
        ]
        with tf.name_scope("ddl_update"):
            norm = apply(
                *(self.strategy, gradients.to_apply, gradients.variables, used),
                *(update.clips[optimizer], self._state.step, update.compiler),
                update.sharding,
            )
        observe("applied", optimizer=optimizer, gradients=gradients)
        return norm

    def change(
        self, number: int, change: Callable[[], tf.Tensor], finite: tf.Tensor | None
    ) -> tf.Tensor:
        ends = number == self._plan.changes and self._plan.ends_with_last_change

        def make() -> tf.Tensor:
            result = change()
            if ends:
                self._move_averages()
            return result

        if self._kept is None or finite is None or self._plan.keeps_values:
            return make()
        undo = self._kept.restore if ends else lambda: None
        return change_unless_overflow(self.strategy, finite, make, undo)

    def finish(self, books: Books) -> None:
        """Moves the averages, or undoes the update, unless its last change has done so."""
        if self._plan.ends_with_last_change:
            return
        if self._kept is None or books.finite is None:
            self._move_averages()
            return

        def make() -> tf.Tensor:
            self._move_averages()
            return tf.zeros([], tf.float64)

        change_unless_overflow(self.strategy, books.finite, make, self._kept.restore)

    def carried(self, books: Books) -> dict[str, Any]:
        update = self._update
        sums = {name: loss.metrics.zeros() for name, loss in self._plan.losses.items()}
        nothing = (tf.zeros([], tf.float64), 0)
        norms = {
            name: tuple(tf.cast(x, tf.float64) for x in books.norms.get(name, nothing))
            for name in self._plan.groups
        }
        carried = {"sums": sums | books.sums, "norms": norms}
        if update.loss_scale is not None:
            carried["finite"] = tf.constant(True) if books.finite is None else books.finite
        return carried

    def _move_averages(self) -> None:
        if self._update.averages is not None:
            self._update.averages.update(self._state.step + 1, self._update.compiler)
