"""The trace of a step that computes no gradients and changes nothing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.optimizers.groups import Group
from ddl.random import batch_counter
from ddl.step.effects.python_draws import Generators, check_python_draws
from ddl.step.effects.stateful import check_stateless
from ddl.step.objective import Objective
from ddl.step.overflow import KeptValues
from ddl.step.reduced import Reduced
from ddl.step.state import TrainingState
from ddl.step.verbs import plan as plans
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.plan import StepPlan
from ddl.step.verbs.planning.planned import Traced, plan_of
from ddl.step.verbs.update import Update
from ddl.step.verbs.values import Summed, Values
from ddl.step.verbs.work import Books, Call
from ddl.tasks.task import LossFunction, Task


def plan_step(
    task: Task,
    groups: Mapping[str, Mapping[str, Group]],
    objective: Callable[[LossFunction, str], Objective],
    strategy: tf.distribute.Strategy,
    data: Mapping[str, BatchPipeline],
) -> StepPlan:
    """Traces a task's step and returns what it computes and changes. Builds the task's models.

    Args:
      task: A task with a `step`.
      groups: The Trainer's optimizers (`ddl.optimizers.groups.groups_by_name`).
      objective: Builds the objective of a loss for the data of a source, which builds the models.
      strategy: The strategy.
      data: The pipeline of each source, by its name.

    Raises:
      ConfigError: If the step misuses a verb, draws by Python or NumPy, applies nothing, leaves an
        optimizer unused, leaves out a trainable variable, or a variable is in no parameter group or
        in two.
    """
    planned = _PlanningTrace(task, list(groups), strategy, data)

    def trace() -> None:
        planned.functions.clear()  # a loss that is defined in the step is new in each trace
        state = TrainingState(*map(_unknown, TrainingState.initial(1.0, tf.zeros([0], tf.float64))))
        batch = Batch({}, {}, batch_counter(state.batches))
        update = Update(planned, state, dict.fromkeys(data, batch), writes=False)
        update.run(lambda *given: plans.run_own_step(task, *given))
        planned.calls, planned.batches = update.calls, update.batches.taken

    def traced() -> tf.Graph:
        with strategy.scope(), microbatch.without_traces_of_the_user():
            return tf.function(trace, autograph=False).get_concrete_function().graph

    while True:
        try:
            generators = Generators(task)
            planned.seed, before = None, generators.states()
            planned.graph = traced()
            if generators.states() != before:
                check_python_draws(f"{type(task).__name__}.step", task, traced)
            check_stateless(f"{type(task).__name__}.step", planned.graph)
            return plan_of(task, planned.traced, groups, strategy)
        except _NewLossError as new:
            # Built here, since models cannot be built within a trace on several replicas.
            planned.losses[new.name] = objective(new.loss, new.source)
            planned.sources[new.name] = new.source


def _unknown(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor without a static value, as the update has one when it is traced."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


class _NewLossError(BaseException):
    """Ends a trace at a new loss. An `except Exception` in the step does not catch it."""

    def __init__(self, name: str, loss: LossFunction, source: str):
        super().__init__(name)
        self.name, self.loss, self.source = name, loss, source


class _PlanningTrace:
    """The work of a planning trace (`ddl.step.verbs.work.Work`). All gradients are zero."""

    def __init__(
        self,
        task: Task,
        optimizers: Sequence[str],
        strategy: tf.distribute.Strategy,
        data: Mapping[str, BatchPipeline],
    ):
        self.strategy = strategy
        self.sources: dict[str, str] = {}
        self.batches: dict[str, int] = {}
        self._data = data
        self.seed: int | None = None
        self.losses: dict[str, Objective] = {}
        self.calls: list[Call] = []
        self.graph = tf.Graph()
        self.functions: dict[str, LossFunction] = {}
        self._task = task
        self._optimizers = optimizers

    @property
    def traced(self) -> Traced:
        """The result of the last trace."""
        return Traced(self.calls, self.batches, self.losses, self.sources, self.graph)

    def name_of_loss(self, loss: LossFunction, name: str | None, source: str) -> str:
        name = plans.name_of_loss(self._task, loss, name)
        if self.functions.setdefault(name, loss) != loss:
            raise ConfigError(
                f"{type(self._task).__name__}.step: two losses have the name {name!r}. Pass "
                'name="…" to tell them apart in figures.'
            )
        if name not in self.losses:
            raise _NewLossError(name, loss, source)
        self._check_source(name, source)
        return name

    def _check_source(self, name: str, source: str) -> None:
        """Raises ConfigError if a loss is computed of two sources whose batches differ in form."""
        first, other = self._data[self.sources[name]], self._data[source]
        sizes = first.global_batch_size, other.global_batch_size
        if first.element_spec != other.element_spec or sizes[0] != sizes[1]:
            raise ConfigError(
                f"{type(self._task).__name__}.step computes the loss {name!r} of the sources "
                f"{self.sources[name]!r} and {source!r}, whose batches have other features, dtypes "
                'or sizes. Pass name="…" for one of them.'
            )

    def name_of_optimizer(self, name: str | None) -> str:
        return plans.name_of_optimizer(self._task, self._optimizers, name)

    def model(self, given: Any) -> Any:
        return plans.model_of(self._task, given)

    def gradients(
        self,
        loss: str,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        draws: int,
        each: OfExample | None,
    ) -> Reduced:
        nothing = tf.zeros([], tf.float64)
        values = [_unknown(tf.zeros(v.shape, v.dtype)) for v in variables]
        return Reduced(values, finite=None, sums=nothing)

    def applied_alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sums(self, name: str, values: Values, batch: StepBatch, draws: int) -> Summed:
        tried = self.losses[name].loss
        assert isinstance(tried, Values)
        zeros, one = tf.zeros(tried.shape, tf.float64), tf.ones([], tf.float64)
        return Summed(_unknown(zeros), _unknown(one), tried.dtype)

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        return None

    def keep_statistics(self) -> KeptValues:
        return KeptValues([], self.strategy)

    def apply(self, optimizer: str, gradients: Gradients) -> tf.Tensor:
        return tf.zeros([], tf.float64)

    def change(
        self, number: int, change: Callable[[], tf.Tensor], finite: tf.Tensor | None
    ) -> tf.Tensor:
        return tf.zeros([], tf.float64)  # the trace holds the writes of the step itself alone

    def carried(self, books: Books) -> dict[str, Any]:
        return {"finite": tf.constant(True)}
