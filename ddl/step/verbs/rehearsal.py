"""A rehearsal of a step of one's own: one trace that computes and changes nothing.

It finds the losses, which variables each optimizer updates, and whether an update can check all
gradients before its first change. Slots and metric sums are laid out by what it finds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.data.pipeline import Batch
from ddl.errors import ConfigError
from ddl.microbatch import Draws
from ddl.random import batch_counter
from ddl.step.global_gradient import Reduced
from ddl.step.kept_values import KeptValues
from ddl.step.objective import Objective
from ddl.step.state import TrainingState
from ddl.step.verbs import plan as plans
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.plan import StepPlan
from ddl.step.verbs.update import Update
from ddl.step.verbs.work import Books, Call
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import LossFunction, Task


def rehearse(
    task: Task,
    optimizers: Sequence[str],
    objective: Callable[[LossFunction], Objective],
    strategy: tf.distribute.Strategy,
) -> StepPlan:
    """Traces a task's step and returns what it computes and changes. Builds the task's models.

    Args:
      task: A task with a `step`.
      optimizers: Names of the Trainer's optimizers.
      objective: Builds the objective of a loss, which builds the models.
      strategy: The strategy.

    Raises:
      ConfigError: If the step misuses a verb, applies nothing, leaves an optimizer unused, or
        leaves out a trainable variable.
    """
    rehearsal = _Rehearsal(task, optimizers, strategy)

    def trace() -> None:
        rehearsal.functions.clear()  # a loss that is defined in the step is new in each trace
        state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
        update = Update(rehearsal, state)
        batch = Batch({}, {}, batch_counter(state.batches))
        plans.run_own_step(task, update, batch)
        rehearsal.calls = update.calls

    while True:
        try:
            with strategy.scope(), microbatch.without_traces_of_the_user():
                tf.function(trace, autograph=False).get_concrete_function()
            return _plan(task, rehearsal, optimizers, strategy)
        except _NewLossError as new:
            # Built here, since models cannot be built within a trace on several replicas.
            rehearsal.losses[new.name] = objective(new.loss)


class _NewLossError(BaseException):
    """Ends a trace at a new loss; an `except Exception` of the step does not catch it."""

    def __init__(self, name: str, loss: LossFunction):
        super().__init__(name)
        self.name, self.loss = name, loss


class _Rehearsal:
    """The work of a rehearsal (`ddl.step.verbs.work.Work`): gradients are zero."""

    def __init__(
        self,
        task: Task,
        optimizers: Sequence[str],
        strategy: tf.distribute.Strategy,
    ):
        self.strategy = strategy
        self.losses: dict[str, Objective] = {}
        self.calls: list[Call] = []
        self.functions: dict[str, LossFunction] = {}
        self._task = task
        self._optimizers = optimizers

    def name_of_loss(self, loss: LossFunction, name: str | None) -> str:
        name = plans.name_of_loss(self._task, loss, name)
        if self.functions.setdefault(name, loss) != loss:
            raise ConfigError(
                f"{type(self._task).__name__}.step: two losses have the name {name!r}. Pass "
                'name="…" to tell them apart in figures.'
            )
        if name not in self.losses:
            raise _NewLossError(name, loss)
        return name

    def name_of_optimizer(self, name: str | None) -> str:
        return plans.name_of_optimizer(self._task, self._optimizers, name)

    def model(self, given: Any) -> Any:
        return plans.model_of(self._task, given)

    def gradients(
        self, loss: str, variables: Sequence[keras.Variable], batch: Batch, draws: Draws
    ) -> Reduced:
        nothing = tf.zeros([], tf.float64)
        return Reduced([tf.zeros(v.shape, v.dtype) for v in variables], nothing, None, nothing)

    def finite(self, gradients: Gradients) -> tf.Tensor | None:
        return None

    def keep_statistics(self) -> KeptValues:
        return KeptValues([], self.strategy)

    def apply(self, optimizer: str, gradients: Gradients) -> tf.Tensor:
        return tf.zeros([], tf.float64)

    def change(
        self, number: int, change: Callable[[], tf.Tensor], finite: tf.Tensor | None
    ) -> tf.Tensor:
        return change()

    def carried(self, books: Books) -> dict[str, Any]:
        return {"noise": tf.zeros([], tf.float64)}


def _plan(
    task: Task,
    rehearsal: _Rehearsal,
    optimizers: Sequence[str],
    strategy: tf.distribute.Strategy,
) -> StepPlan:
    """Derives the plan from the calls of the rehearsal, and checks it."""
    calls = rehearsal.calls
    changes = [place for place, call in enumerate(calls) if call.verb != "gradients"]
    applies = [call for call in calls if call.verb == "apply"]
    name = type(task).__name__
    if not applies:
        raise ConfigError(
            f"{name}.step applies no gradients, so it trains nothing. Call update.apply or "
            "update.minimize in it."
        )
    unused = [optimizer for optimizer in optimizers if optimizer not in {c.name for c in applies}]
    if unused:
        raise ConfigError(
            f"{name}.step never uses the optimizer {', '.join(map(repr, unused))}. Remove it from "
            "Trainer.optimizer, or name it in update.apply."
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
    after_change = any(call.checks for call in calls[changes[0] + 1 :])
    changed = {id(v.value) for call in applies for v in call.variables} | set(map(id, averaged))
    weights = [v.value for layer in layers for v in layer._trainable_variables]
    return StepPlan(
        task=task,
        losses=rehearsal.losses,
        variables={o: _variables_of(applies, o) for o in optimizers},
        applies={o: _number_of(applies, o) for o in optimizers},
        changes=len(changes),
        keeps_values=after_change or any(calls[place].sometimes for place in changes),
        averaged=averaged,
        own=own,
        frozen=[
            v
            for v in weights
            if id(v) not in changed and strategy.extended.variable_created_in_scope(v)
        ],
    )


def _variables_of(applies: Sequence[Call], optimizer: str) -> list[keras.Variable]:
    variables = [v for call in applies if call.name == optimizer for v in call.variables]
    return list({id(v): v for v in variables}.values())


def _number_of(applies: Sequence[Call], optimizer: str) -> int | None:
    own = [call for call in applies if call.name == optimizer]
    return None if any(call.sometimes for call in own) else len(own)


def _check_known(name: str, known: Sequence[tf.Variable], calls: Sequence[Call]) -> None:
    """Raises ConfigError if a verb is about a variable that is not found in the task."""
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
