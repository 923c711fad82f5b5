"""Planning of a task's own step by a trace that computes no gradients and changes nothing.

The trace finds the losses, the variables that each optimizer updates, and whether an update can
check all gradients before its first change. Its plan defines the optimizer slots and the metric
sums.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.data.pipeline import Batch, BatchPipeline
from ddl.errors import ConfigError
from ddl.microbatch import Draws
from ddl.optimizers.groups import Group, assign
from ddl.optimizers.schedule_free import AdamWScheduleFree
from ddl.random import batch_counter
from ddl.step.objective import Objective
from ddl.step.overflow import KeptValues
from ddl.step.reduced import Reduced
from ddl.step.state import TrainingState
from ddl.step.verbs import plan as plans
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.changes import check_saved, written_in
from ddl.step.verbs.draws import check_draws
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.plan import StepPlan
from ddl.step.verbs.update import Update
from ddl.step.verbs.values import Values
from ddl.step.verbs.work import Books, Call
from ddl.tasks.parts import layers_of, own_variables_of
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
      groups: The Trainer's optimizers (`ddl.optimizers.named.groups_by_name`).
      objective: Builds the objective of a loss for the data of a source, which builds the models.
      strategy: The strategy.
      data: The pipeline of each source, by its name.

    Raises:
      ConfigError: If the step misuses a verb, applies nothing, leaves an optimizer unused, leaves
        out a trainable variable, or a variable is in no parameter group or in two.
    """
    planned = _PlanningTrace(task, list(groups), strategy, data)

    def trace() -> None:
        planned.functions.clear()  # a loss that is defined in the step is new in each trace
        state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
        batch = Batch({}, {}, batch_counter(state.batches))
        update = Update(planned, state, dict.fromkeys(data, batch), writes=False)
        update.run(lambda *given: plans.run_own_step(task, *given))
        planned.calls, planned.batches = update.calls, update.batches.taken

    while True:
        try:
            with strategy.scope(), microbatch.without_traces_of_the_user():
                traced = tf.function(trace, autograph=False).get_concrete_function()
            planned.graph = traced.graph
            check_draws(task, planned.graph)
            return _plan(task, planned, groups, strategy)
        except _NewLossError as new:
            # Built here, since models cannot be built within a trace on several replicas.
            planned.losses[new.name] = objective(new.loss, new.source)
            planned.sources[new.name] = new.source


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
        draws: Draws,
        each: OfExample | None,
    ) -> Reduced:
        nothing = tf.zeros([], tf.float64)
        values = [tf.zeros(v.shape, v.dtype) for v in variables]
        return Reduced(values, finite=None, sums=nothing, noise=None)

    def applied_alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sums(
        self, name: str, values: Values, batch: StepBatch, draws: Draws
    ) -> tuple[tf.Tensor, tf.Tensor]:
        tried = self.losses[name].loss
        assert isinstance(tried, Values)
        return tf.zeros(tried.shape, tried.dtype), tf.ones([], tf.float64)

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

    def add_noise(self, books: Books, optimizer: str, new: tf.Tensor | None) -> None:
        pass

    def carried(self, books: Books) -> dict[str, Any]:
        return {"finite": tf.constant(True)}


def _plan(
    task: Task,
    planned: _PlanningTrace,
    groups: Mapping[str, Mapping[str, Group]],
    strategy: tf.distribute.Strategy,
) -> StepPlan:
    """Derives the plan from the calls of the planning trace, and checks it."""
    calls = planned.calls
    changes = [place for place, call in enumerate(calls) if call.changes]
    means = {call.name for call in calls if call.verb == "sum"}
    applies = [call for call in calls if call.verb == "apply"]
    gradients = [call for call in calls if call.verb == "gradients"]
    name = type(task).__name__
    if not applies:
        raise ConfigError(
            f"{name}.step applies no gradients, so it trains nothing. Call update.apply or "
            "update.minimize in it."
        )
    unused = [optimizer for optimizer in groups if optimizer not in {c.name for c in applies}]
    if unused:
        raise ConfigError(
            f"{name}.step never uses the optimizer {', '.join(map(repr, unused))}. Remove it from "
            "Trainer.optimizer, or name it in update.apply."
        )
    if idle := set(planned.batches) - set(planned.sources.values()):
        raise ConfigError(
            f"{name}.step never uses the source {', '.join(map(repr, sorted(idle)))}. Remove it "
            "from Trainer.train_data, or pass its batch to a method of update."
        )
    layers = layers_of(task)
    own = own_variables_of(task, layers)
    for variable in own:
        if not strategy.extended.variable_created_in_scope(variable):
            raise ConfigError(
                f"The variable {variable.name!r} of {name} was created outside the strategy's "
                "scope. Create the task under `with strategy.scope():`."
            )
    averaged = [v for call in calls if call.verb == "average" for v in call.variables]
    variables = [v for layer in layers for v in layer.variables]
    _check_known(name, [v.value for v in variables] + own, calls)
    _check_covered(name, layers, applies, averaged)
    optimizers = [one.optimizer for of_name in groups.values() for one in of_name.values()]
    of_optimizers = [v.value for optimizer in optimizers for v in optimizer.variables]
    check_saved(name, planned.graph, [*(v.value for v in variables), *own, *of_optimizers])
    by_hand = written_in(planned.graph, [v.value for v in variables])
    after_change = any(call.checks for call in calls[changes[0] + 1 :])
    changed = {id(v.value) for call in applies for v in call.variables} | set(map(id, averaged))
    weights = [v.value for layer in layers for v in layer._trainable_variables]
    frozen = [
        v
        for v in weights
        if id(v) not in changed and strategy.extended.variable_created_in_scope(v)
    ]
    after_change |= bool({*map(id, by_hand)} - {*map(id, frozen)})
    variables_by_optimizer: dict[str, list[keras.Variable]] = {}
    numbers: dict[str, int | None] = {}
    for used, own_groups in groups.items():
        for optimizer, updated in assign(own_groups, _variables_of(applies, used)).items():
            variables_by_optimizer[optimizer] = updated
            numbers[optimizer] = _number_of(applies, used, updated)
            of = own_groups[optimizer].optimizer
            _check_schedule_free(name, of, applies, used, updated, by_hand)
    return StepPlan(
        task=task,
        losses={n: loss for n, loss in planned.losses.items() if n not in means},
        means={n: loss for n, loss in planned.losses.items() if n in means},
        groups=groups,
        sources=planned.sources,
        batches=planned.batches,
        variables=variables_by_optimizer,
        applies=numbers,
        applied={used: sorted({c.loss for c in applies if c.name == used}) for used in groups},
        changes=len(changes),
        only_moved={c.name for c in gradients} - {c.name for c in gradients if not c.moved},
        keeps_values=after_change or any(calls[place].sometimes for place in changes),
        averaged=averaged,
        own=own,
        frozen=frozen,
    )


def _variables_of(applies: Sequence[Call], optimizer: str) -> list[keras.Variable]:
    variables = [v for call in applies if call.name == optimizer for v in call.variables]
    return list({id(v): v for v in variables}.values())


def _number_of(
    applies: Sequence[Call], optimizer: str, variables: Sequence[keras.Variable]
) -> int | None:
    """Returns how often a step updates any of the variables; None if it depends on a tensor."""
    ids = set(map(id, variables))
    of_optimizer = [call for call in applies if call.name == optimizer]
    own = [call.times for call in of_optimizer if any(id(v) in ids for v in call.variables)]
    return None if None in own else sum(times for times in own if times is not None)


def _check_schedule_free(
    name: str,
    optimizer: keras.optimizers.Optimizer,
    applies: Sequence[Call],
    used: str,
    variables: Sequence[keras.Variable],
    by_hand: Sequence[tf.Variable],
) -> None:
    """Raises ConfigError for a schedule-free optimizer whose average would not be defined.

    The average of a variable counts the updates of the optimizer, so it must update all of its
    variables at once, and nothing else may change them.
    """
    ids = set(map(id, variables))
    parts = [ids & set(map(id, call.variables)) for call in applies if call.name == used]
    if not isinstance(optimizer, AdamWScheduleFree):
        return
    if assigned := [v.path for v in variables if any(v.value is own for own in by_hand)]:
        raise ConfigError(
            f"{name}.step assigns to {', '.join(assigned)}, which AdamWScheduleFree updates, so "
            "that its average is not defined. Leave the assignment out, or use another optimizer."
        )
    if any(part and part != ids for part in parts):
        raise ConfigError(
            f"{name}.step applies gradients of some of the variables of AdamWScheduleFree, which "
            "must update all of them at once. Join the gradients with `and_of`, or give each part "
            "an optimizer of its own."
        )


def _check_known(name: str, known: Sequence[tf.Variable], calls: Sequence[Call]) -> None:
    """Raises ConfigError if a verb uses a variable that is not found in the task."""
    ids = set(map(id, known))
    used = [v for call in calls for v in call.variables]
    bare = {id(v.value if isinstance(v, keras.Variable) else v): v for v in used}
    unknown = [getattr(v, "path", v.name) for key, v in bare.items() if key not in ids]
    if unknown:
        raise ConfigError(
            f"{name}.step uses the variables {', '.join(unknown)}, but no attribute of {name} "
            "leads to them, so no checkpoint would hold them. Keep their layers in attributes of "
            "the task, or in lists and dicts in attributes."
        )


def _check_covered(
    name: str,
    layers: Sequence[keras.layers.Layer],
    applies: Sequence[Call],
    averaged: Sequence[tf.Variable],
) -> None:
    """Raises ConfigError if a trainable variable of the task is never changed."""
    changed = {id(v.value) for call in applies for v in call.variables} | set(map(id, averaged))
    trainable = {id(v.value): v for layer in layers for v in layer.trainable_variables}
    forgotten = [v.path for key, v in trainable.items() if key not in changed]
    if forgotten:
        raise ConfigError(
            f"{name}.step changes no variable of {', '.join(forgotten)}, although they are "
            "trainable. Pass their layers to update.minimize or update.average, or set trainable "
            "= False on them."
        )
