"""The methods of `update` that a step calls: its verbs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import keras
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import ConfigError, check_takes
from ddl.step.global_gradient import Reduced
from ddl.step.loss import Loss
from ddl.step.overflow import KeptValues
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch, StepBatches, check_batch
from ddl.step.verbs.call_context import CallContext
from ddl.step.verbs.changes import add, check_decay, move_towards, weights_of_both
from ddl.step.verbs.draws import StepDraws
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import (
    Gradients,
    check_gradients,
    draws_of,
    trainable_variables,
)
from ddl.step.verbs.misuse import Guarded, explained
from ddl.step.verbs.names import model_of, name_of_loss, name_of_optimizer
from ddl.step.verbs.values import OfExamples, Values, mean_of, sum_of
from ddl.tasks.task import LossFunction


class Engine(Protocol):
    """The computation behind the verbs: a `TrainStep`, or a rehearsal that computes nothing."""

    @property
    def task(self) -> Any:
        """The task."""

    @property
    def optimizer_names(self) -> Sequence[str]:
        """The names of the optimizers that a step can use."""

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy."""

    @property
    def seed(self) -> int:
        """Seed of the step's own random draws."""

    @property
    def writes(self) -> bool:
        """Whether verbs write variables."""

    @property
    def statistics(self) -> Sequence[tf.Variable]:
        """Variables that a forward pass changes."""

    def loss(self, function: LossFunction, name: str, source: str, is_mean: bool) -> Loss:
        """Returns the loss of a name, which is computed of a source's batches."""

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

    def sums(
        self, loss: Loss, batch: StepBatch, state: TrainingState, draws: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the weighted sums of a function of the examples, and the sum of the weights."""

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        """Returns whether values are finite, bool []; None without loss scaling."""

    def apply(
        self, optimizer: str, gradients: Gradients, state: TrainingState, in_branch: bool
    ) -> tf.Tensor:
        """Applies gradients; returns their norm before clipping, float64 []."""

    def note_average(self, targets: Sequence[tf.Variable]) -> None:
        """Takes note of the variables that `average` moves."""


class Results:
    """The results of the verbs of an update so far.

    Attributes:
      finite: Whether all values so far are finite, bool []; None without loss scaling.
      sums: Metric sums of each loss outside of `moved`, by its name.
      sums_moved: Those within `moved`.
      norms: Sum and number of the gradient norms of each optimizer, float64 [2], by its name.
    """

    def __init__(self) -> None:
        self.finite: tf.Tensor | None = None
        self.sums: dict[str, tf.Tensor] = {}
        self.sums_moved: dict[str, tf.Tensor] = {}
        self.norms: dict[str, tf.Tensor] = {}

    def check(self, finite: tf.Tensor | None) -> None:
        """Adds a check for overflow, on which the update then depends; None adds none."""
        if finite is not None:
            self.finite = finite if self.finite is None else self.finite & finite

    def tensors(self) -> dict[str, Any]:
        """Returns all of it as a structure that a branch can return."""
        finite = {} if self.finite is None else {"finite": self.finite}
        return {**finite, "sums": self.sums, "sums_moved": self.sums_moved, "norms": self.norms}

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Adds what a branch has computed."""
        self.check(tensors.get("finite"))
        for kind in ("sums", "sums_moved", "norms"):
            for name, value in tensors[kind].items():
                add_to(getattr(self, kind), name, value)


def add_to(sums: dict[str, tf.Tensor], name: str, value: tf.Tensor) -> None:
    """Adds a value to that of the name, if there is one."""
    sums[name] = sums[name] + value if name in sums else value


class Update(Guarded):
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
      results: The results of the verbs so far.
    """

    _called = "update"
    _offered = (
        *("gradients", "apply", "minimize", "moved", "average", "mean", "sum"),
        *("next", "when", "step"),
    )

    def __init__(self, engine: Engine, state: TrainingState, batches: Mapping[str, Batch]):
        """Keeps the arguments; `ddl.Trainer` makes the update.

        Args:
          engine: Computes gradients and applies them.
          state: The state before the update.
          batches: The batches of each source, by its name, all with the same counter.
        """
        self._engine = engine
        self._state = state
        self._draws = StepDraws(engine.seed, next(iter(batches.values())).counter)
        self._context = CallContext()
        self._in_branch = False
        self._passes = 0
        self.batches = StepBatches(batches)
        self.results = Results()

    def run(self, step: Callable[["Update", Any], None]) -> Results:
        """Runs a step with this update; what the step draws itself is the same on all replicas."""
        with self._draws.forward():
            step(self, self.batches.given)
        self._context.end()
        return self.results

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
        self._context.check("next")
        check_batch("next", batch)
        return self.batches.next(batch, self._in_branch)

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
        return self._gradients(
            loss, batch, model, name, same_draws_as, moves_statistics, each, alone=False
        )

    def _gradients(
        self,
        function: LossFunction,
        batch: StepBatch,
        model: Any,
        name: str | None,
        same_draws_as: Gradients | None,
        moves_statistics: bool,
        each: OfExample | None,
        alone: bool,
    ) -> Gradients:
        engine = self._engine
        self._context.check("gradients")
        check_batch("gradients", batch)
        name = name_of_loss(engine.task, function, name)
        loss = engine.loss(function, name, batch.source, is_mean=False)
        if each is not None:
            check_takes("`each` of update.gradients", each, ("gradients",))
        variables = trainable_variables(model_of(engine.task, model), "`model` of update.gradients")
        draws = self._next_draws(same_draws_as)
        with self._statistics(moves_statistics):
            reduced = engine.gradients(loss, variables, batch, self._state, draws, each, alone)
        self.results.check(reduced.finite)
        sums = self.results.sums_moved if self._context.has_moved else self.results.sums
        add_to(sums, name, reduced.sums)
        return Gradients(
            engine.strategy, variables, reduced.values, reduced.factor, draws=draws, checked=True
        )

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
        draws = self._next_draws(same_draws_as)
        with self._statistics(moves_statistics):
            values, total, weight = self._sums("mean", function, batch, name, draws)
        mean = mean_of(values, total, weight)
        self.results.check(self._engine.finite([mean]))
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
        draws = self._next_draws(None)
        values, total, _ = self._sums("sum", function, batch, name, draws)
        summed = sum_of(values, total)
        self.results.check(self._engine.finite([summed]))
        return summed

    def _sums(
        self, verb: str, function: OfExamples, batch: StepBatch, name: str | None, draws: int
    ) -> tuple[Values, tf.Tensor, tf.Tensor]:
        self._context.check(verb)
        check_batch(verb, batch)
        check_takes(f"The function of update.{verb}", function, ("features", "training"))
        values = Values(function, f"update.{verb}")
        name = name_of_loss(self._engine.task, values, name)
        loss = self._engine.loss(values, name, batch.source, is_mean=True)
        total, weight = self._engine.sums(loss, batch, self._state, draws)
        assert isinstance(loss.function, Values)
        return loss.function, total, weight

    def apply(self, gradients: Gradients, optimizer: str | None = None) -> None:
        """Applies gradients: adds regularization, clips, and lets an optimizer update.

        Args:
          gradients: Gradients of the global batch.
          optimizer: Name of the optimizer, where the Trainer has several.

        Raises:
          ConfigError: If there is no optimizer of that name.
        """
        engine = self._engine
        self._context.check("apply")
        check_gradients("update.apply", gradients)
        self._context.check_not_moved("apply", [v.value for v in gradients.variables])
        name = name_of_optimizer(engine.task, engine.optimizer_names, optimizer)
        if not gradients.checked:
            self.results.check(engine.finite(gradients.of_replicas))
        norm = engine.apply(name, gradients, self._state, self._in_branch)
        add_to(self.results.norms, name, tf.stack([norm, tf.ones([], tf.float64)]))

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
        self.apply(self.gradients_to_apply(loss, batch, name, model), optimizer)

    def gradients_to_apply(
        self, loss: LossFunction, batch: StepBatch, name: str | None = None, model: Any = None
    ) -> Gradients:
        """Returns `gradients` that are used in one `apply` alone, with the same arguments."""
        gradients = self._gradients(loss, batch, model, name, None, True, None, alone=True)
        gradients.is_shared = False
        return gradients

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
        self._context.check("moved")
        check_gradients("update.moved", by)
        model = model_of(self._engine.task, model)
        own = by.of(trainable_variables(model, "`model` of update.moved"))
        return self._context.must_enter(self._moved(own))

    @contextmanager
    def _moved(self, by: Gradients) -> Iterator[None]:
        self._context.check("moved")
        strategy, writes = self._engine.strategy, self._engine.writes
        variables = [variable.value for variable in by.variables]
        self._context.check_not_moved("moved", variables)
        kept = KeptValues(variables if writes else [], strategy)
        for variable, value in zip(variables, by.of_replicas, strict=True):
            if writes:
                strategy.extended.update(variable, add, args=(value,))
        with self._context.moving(variables):
            yield
        self._context.check("moved")
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
        self._context.check("average")
        check_decay(decay)
        targets, sources = weights_of_both(target, of)
        self._context.check_not_moved("average", targets)
        self._engine.note_average(targets)
        if self._engine.writes:
            move_towards(self._engine.strategy, targets, sources, decay)

    def when(self, condition: tf.Tensor, function: Callable[[], Any]) -> None:
        """Calls a function, which may call this update, if a condition holds.

            update.when(update.step % 5 == 0, lambda: update.minimize(self.fools, batch, …))

        Args:
          condition: bool [], the same on all replicas, such as a function of `step` or of a norm.
          function: Takes no arguments; its result is not used.

        Raises:
          ConfigError: If the condition is no bool scalar, or the function takes arguments.
        """
        self._context.check("when")
        holds = _condition(condition)
        check_takes("The function of update.when", function, ())
        of_branch: list[dict[str, Any]] = []

        def made() -> dict[str, Any]:
            with self._branch() as results:
                function()
            of_branch.append(results.tensors())
            return of_branch[0]

        def skipped() -> dict[str, Any]:  # traced after `made`
            zeros = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), of_branch[0])
            if "finite" in zeros:
                zeros["finite"] = tf.constant(True)
            return zeros

        self.results.add(tf.cond(holds, made, skipped))

    @contextmanager
    def _branch(self) -> Iterator[Results]:
        """Makes verbs compute in the present graph, for results of their own, in the block."""
        earlier = self._in_branch, self.results
        self._in_branch, self.results = True, Results()
        try:
            with self._context.in_present_graph(), self._draws.in_branch().forward():
                yield self.results
        finally:
            self._in_branch, self.results = earlier

    def _statistics(self, move: bool) -> AbstractContextManager[None]:
        """Restores the statistics that a forward pass moves within the `with` block, or not."""
        return nullcontext() if move else self._restoring_statistics()

    @contextmanager
    def _restoring_statistics(self) -> Iterator[None]:
        kept = KeptValues(self._engine.statistics, self._engine.strategy)
        yield
        kept.restore()

    def _next_draws(self, earlier: Gradients | None) -> int:
        """Returns the number of the next pass, or that of earlier gradients."""
        number = self._passes if earlier is None else draws_of(earlier)
        self._passes += 1
        return number


def _condition(given: Any) -> tf.Tensor:
    """Returns a condition as bool []."""
    try:
        condition = tf.convert_to_tensor(given)
    except (TypeError, ValueError):
        condition = None
    if condition is None or condition.dtype != tf.bool or condition.shape.rank != 0:
        raise ConfigError(
            "update.when: the condition must be a bool scalar, such as update.step % 5 == 0, got "
            f"{given!r:.80}."
        )
    return condition


def run_own_step(task: Any, update: Update, batch: Any) -> None:
    """Runs a task's step.

    Raises:
      ConfigError: If it misuses a verb, branches on a tensor in Python, or makes variables; names
        the line.
    """

    def refuse(create: Callable[..., Any], **arguments: Any) -> Any:
        raise ConfigError(
            f"{type(task).__name__}.step must not make variables: it is traced once and runs many "
            "times. Make them in the task's constructor, under `with strategy.scope():`."
        )

    classes = {"update": Update, "gradients": Gradients}
    with explained(task, classes), tf.variable_creator_scope(refuse):
        task.step(update, batch)
