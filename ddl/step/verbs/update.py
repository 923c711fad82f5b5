"""The methods of `update` that a step calls: its verbs."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import check_takes
from ddl.step.overflow import KeptValues
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch, StepBatches, check_batch
from ddl.step.verbs.changes import add, check_decay, move_towards, weights_of_both
from ddl.step.verbs.control_flow import ControlFlow
from ddl.step.verbs.draws import StepDraws
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import (
    Gradients,
    check_gradients,
    draws_of,
    trainable_variables,
)
from ddl.step.verbs.values import OfExamples, Summed, Values
from ddl.step.verbs.work import Call, Work
from ddl.tasks.task import LossFunction


class Update(ControlFlow):
    """One update, made of the verbs that a task's `step(update, batch)` calls.

        class Sam:  # Foret et al. 2021, "Sharpness-aware minimization"
            def step(self, update, batch):
                up = update.gradients(self.per_example, batch)
                with update.moved(self.model, up * (self.rho / up.norm())):
                    sharp = update.gradients(self.per_example, batch, same_draws_as=up)
                update.apply(sharp)

    A step is written as if one device held the global batch. It runs in cross-replica context, in
    a graph; its losses run in replica context. If a gradient overflows, weights, slots, statistics,
    averages and the task's own variables keep their values.

    Attributes:
      batches: Hands out the batches of the update.
      calls: The calls of verbs so far.
    """

    _called = "update"
    _offered = (
        *("gradients", "apply", "minimize", "moved", "average", "mean", "sum"),
        *("next", "when", "step"),
    )

    def __init__(
        self,
        work: Work,
        state: TrainingState,
        batches: Mapping[str, Batch],
        only_moved: Container[str] = (),
        writes: bool = True,
    ):
        """Keeps the arguments; `ddl.Trainer` makes the update.

        Args:
          work: Computes gradients and applies them.
          state: The state before the update.
          batches: The batches of each source, by its name, all with the same counter.
          only_moved: Names of the losses that the step computes within `moved` alone.
          writes: Whether verbs write variables; the planning trace leaves that to the step itself.
        """
        super().__init__(work, StepDraws(work.seed, next(iter(batches.values())).counter))
        self._state = state
        self._passes = 0
        self._only_moved, self._writes = only_moved, writes
        self.batches = StepBatches(batches)
        self.calls: list[Call] = []

    def run(self, step: Callable[["Update", Any], None]) -> None:
        """Runs a step with this update; what the step draws itself is the same on all replicas."""
        with self._draws.forward():
            step(self, self.batches.given)
        self._call_context.end()

    @property
    def step(self) -> tf.Tensor:
        """Number of updates made before this one, int64 []."""
        return self._state.step

    def next(self, batch: StepBatch) -> StepBatch:
        """Returns a further batch of the source of a batch, of the same size.

            for _ in range(5):
                update.minimize(self.criticizes, update.next(batch), self.critic)

        Each update reads the same number of batches, so an epoch has fewer updates.

        Raises:
          ConfigError: Within `when`.
        """
        self._call_context.check("next")
        check_batch("next", batch)
        return self.batches.next(batch, self._is_in_branch)

    def gradients(
        self,
        loss: LossFunction,
        batch: StepBatch,
        model: Any = None,
        *,
        name: str | None = None,
        same_draws_as: Gradients | None = None,
        moves_statistics: bool = True,
        each: OfExample | None = None,
    ) -> Gradients:
        """Computes the gradient of a loss over the global batch.

        The loss is computed on all microbatches and replicas and summed once. The logged values of
        a loss are means over its calls outside of `moved`, or over all calls if there are none.

        Args:
          loss: A method of the task with the arguments and the result of `per_example`.
          batch: The batch that the step was given.
          model: Model, layer or list of variables to differentiate by; None: the task's `model`.
          name: Name of the loss in figures; None: the name of the method.
          same_draws_as: Gradients whose passes drew the numbers to draw again; None: new numbers.
          moves_statistics: Whether this forward pass moves statistics such as moving averages.
          each: Changes the gradient of each example before they are added up, such as to clip it
            (DP-SGD): takes and returns a list with a tensor for each variable. It computes for one
            example, and `tf.vectorized_map` runs it on all. The gradients of all examples of a
            replica are in memory at once.

        Returns:
          The gradients, the same on all replicas: divided by the global weight, unscaled, not
          clipped. Each has shape and dtype of its variable.

        Raises:
          ConfigError: If the loss is not a function of the task, does not depend on a variable, or
            returns something else than a `ddl.PerExample`; with `each`, if the model normalizes
            over the batch.
        """
        self._call_context.check("gradients")
        check_batch("gradients", batch)
        name = self._work.name_of_loss(loss, name, batch.source)
        if each is not None:
            check_takes("`each` of update.gradients", each, ("gradients",))
        variables = trainable_variables(self._work.model(model), "`model` of update.gradients")
        draws = self._draws_of(same_draws_as)
        self._passes += 1
        with self._statistics(moves_statistics):
            reduced = self._work.gradients(name, variables, batch, draws, each)
        self._record("gradients", name, variables)
        self.books.add_check(reduced.finite)
        if not self._call_context.has_moved or name in self._only_moved:
            self.books.add_sums(name, reduced.sums)
        return Gradients(self._work.strategy, variables, reduced.values, draws, True)

    def mean(
        self,
        function: OfExamples,
        batch: StepBatch,
        *,
        name: str | None = None,
        same_draws_as: Gradients | None = None,
        moves_statistics: bool = True,
    ) -> tf.Tensor:
        """Computes the mean of a function of the examples over the global batch.

            self.center.assign(update.mean(self.outputs_of_teacher, batch))

        Args:
          function: A method of the task with the arguments of a loss, which returns a float tensor
            [batch, …]. The row of an example must depend only on that example.
          batch: The batch that the step was given.
          name: Name of the function; None: its own name.
          same_draws_as: As in `gradients`.
          moves_statistics: As in `gradients`.

        Returns:
          Tensor […] of the function's dtype, weighted by the weights of the data.

        Raises:
          ConfigError: If the function returns something else, or depends on other examples.
        """
        draws = self._draws_of(same_draws_as)
        with self._statistics(moves_statistics):
            mean = self._sums("mean", function, batch, name, draws).mean()
        self.books.add_check(self._work.finite([mean]))
        return mean

    def sum(self, function: OfExamples, batch: StepBatch, *, name: str | None = None) -> tf.Tensor:
        """Computes the sum of a function of the examples over the global batch.

        The sum of ones is the sum of the weights: the number of examples, if the data have none.

        Args:
          function: As in `mean`.
          batch: As in `mean`.
          name: As in `mean`.

        Returns:
          Tensor […] of the function's dtype, or float32 for half precision: values times weights.

        Raises:
          ConfigError: As `mean`.
        """
        total = self._sums("sum", function, batch, name, self._draws_of(None)).sum()
        self.books.add_check(self._work.finite([total]))
        return total

    def _sums(
        self, verb: str, function: OfExamples, batch: StepBatch, name: str | None, draws: int
    ) -> Summed:
        self._call_context.check(verb)
        check_batch(verb, batch)
        check_takes(f"The function of update.{verb}", function, ("features", "training"))
        values = Values(function, f"update.{verb}")
        name = self._work.name_of_loss(values, name, batch.source)
        self._passes += 1
        summed = self._work.sums(name, values, batch, draws)
        self._record("sum", name, ())
        return summed

    def apply(self, gradients: Gradients, optimizer: str | None = None) -> None:
        """Applies gradients: adds regularization, clips, and lets an optimizer update.

        Args:
          gradients: Gradients of the global batch.
          optimizer: Name of the optimizer, where the Trainer has several.

        Raises:
          ConfigError: If there is no optimizer of that name.
        """
        self._call_context.check("apply")
        check_gradients("update.apply", gradients)
        self._call_context.check_not_moved("apply", [v.value for v in gradients.variables])
        name = self._work.name_of_optimizer(optimizer)
        self._record("apply", name, gradients.variables, checks=not gradients.checked)
        if not gradients.checked:
            self.books.add_check(self._work.finite(gradients.of_replicas))
        self.books.add_norm(name, self._change(lambda: self._work.apply(name, gradients)))

    def minimize(
        self,
        loss: LossFunction,
        batch: StepBatch,
        model: Any = None,
        *,
        optimizer: str | None = None,
        name: str | None = None,
    ) -> None:
        """Computes the gradient of a loss and applies it: `gradients`, then `apply`.

        Args:
          loss: As in `gradients`.
          batch: As in `gradients`.
          model: As in `gradients`.
          optimizer: As in `apply`.
          name: As in `gradients`.

        Raises:
          ConfigError: As `gradients` and `apply`.
        """
        with self._work.applied_alone():
            gradients = self.gradients(loss, batch, model, name=name)
        gradients.is_shared = False
        self.apply(gradients, optimizer)

    def moved(self, model: Any, by: Gradients) -> AbstractContextManager[None]:
        """Adds `by` to the weights within the `with` block; restores them bit for bit after it.

        Args:
          model: Model, layer or list of variables to move; None: the task's `model`.
          by: Values to add, such as a multiple of gradients.

        Returns:
          A context manager, for a `with` statement.

        Raises:
          ConfigError: If `by` holds nothing for a variable, or the weights are moved already.
        """
        self._call_context.check("moved")
        check_gradients("update.moved", by)
        own = by.of(trainable_variables(self._work.model(model), "`model` of update.moved"))
        return self._call_context.must_enter(self._moved(own))

    @contextmanager
    def _moved(self, by: Gradients) -> Iterator[None]:
        self._call_context.check("moved")
        variables = [variable.value for variable in by.variables]
        self._call_context.check_not_moved("moved", variables)
        kept = KeptValues(variables if self._writes else [], self._work.strategy)
        for variable, value in zip(variables, by.of_replicas, strict=True):
            if self._writes:
                self._work.strategy.extended.update(variable, add, args=(value,))
        with self._call_context.moving(variables):
            yield
        self._call_context.check("moved")
        kept.restore()

    def average(self, target: Any, *, of: Any, decay: float | tf.Tensor) -> None:
        """Moves weights towards others: target ← target + (1 - decay)·(of - target).

        As the mean teacher of Tarvainen and Valpola 2017, once for each call, on all replicas.

        Args:
          target: Model, layer or list of variables to move, with its moving statistics.
          of: Model, layer or list of variables of the same shapes.
          decay: Share of the target that stays; a number, or a scalar tensor.

        Raises:
          ConfigError: If the shapes differ, or the decay is out of range.
        """
        self._call_context.check("average")
        check_decay(decay)
        targets, sources = weights_of_both(target, of)
        self._call_context.check_not_moved("average", targets)
        self._record("average", "", targets)

        def change() -> tf.Tensor:
            move_towards(self._work.strategy, targets, sources, decay)
            return tf.zeros([], tf.float64)

        self._change(change)

    @contextmanager
    def _statistics(self, move: bool) -> Iterator[None]:
        """Restores the statistics that a forward pass moves within the `with` block, or not."""
        kept = None if move else self._work.keep_statistics()
        yield
        if kept is not None:
            kept.restore()

    def _change(self, change: Callable[[], tf.Tensor]) -> tf.Tensor:
        number = sum(call.changes for call in self.calls)
        return self._work.change(number, change, self.books.finite)

    def _record(self, verb: str, name: str, variables: Sequence[Any], checks: bool = False) -> None:
        checks = checks or verb in ("gradients", "sum")
        call = Call(verb, name, variables, self._is_in_branch, checks, self._call_context.has_moved)
        self.calls.append(call)

    def _draws_of(self, earlier: Gradients | None) -> int:
        return self._passes if earlier is None else draws_of(earlier)
