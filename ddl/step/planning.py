"""What a task's step computes and changes, known before the slots and the sums are laid out.

A step of the user's own is rehearsed: traced once with gradients and sums of unknown values, which
computes nothing and writes nothing. Each loss is probed (`ddl.step.probes`) when the step first
uses it. The trace of the training loop then runs the same code.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.optimizers.groups import Group, assign
from ddl.random import batch_counter
from ddl.step.effects import (
    Generators,
    check_python_draws,
    check_stateless,
    check_writes,
    written_in,
)
from ddl.step.global_gradient import Reduced
from ddl.step.loss import Loss
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import Gradients, trainable_variables
from ddl.step.verbs.update import Update, run_own_step
from ddl.tasks.gather import MicrobatchesError, gathers_error
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import LossFunction, Task

BUILT_IN = "per_example"
"""Name of the loss of the built-in step."""

LossOf = Callable[[LossFunction, str], Loss]
"""Probes a loss in training: takes the function and the name of the source."""


class Applied(NamedTuple):
    """What a step applies with an optimizer.

    Attributes:
      variables: The variables, each once.
      times: Number of updates in a step; None if it depends on a tensor.
    """

    variables: list[keras.Variable]
    times: int | None


class Plan(NamedTuple):
    """What a step computes and changes.

    Attributes:
      losses: The losses whose gradients it computes, by name.
      means: The functions that it averages or sums, by name.
      groups: Parameter groups of each optimizer of the step, by both names.
      applied: What it applies with the optimizer of each group, by the name of the group.
      batches: Number of batches that an update reads of each source, by its name.
      averaged: Variables that `update.average` moves.
      own: Variables that the task keeps outside of its layers.
      assigned: Saved variables that the step itself assigns.
    """

    losses: Mapping[str, Loss]
    means: Mapping[str, Loss]
    groups: Mapping[str, Mapping[str, Group]]
    applied: Mapping[str, Applied]
    batches: Mapping[str, int]
    averaged: Sequence[tf.Variable] = ()
    own: Sequence[tf.Variable] = ()
    assigned: Sequence[tf.Variable] = ()

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of all optimizers, each once."""
        every = [v for one in self.applied.values() for v in one.variables]
        return list({id(v): v for v in every}.values())

    def frozen_until(self, group: str) -> int:
        """Returns the step from which a group's optimizer updates its variables."""
        return next(own for own in self.groups.values() if group in own)[group].frozen_until

    def check_microbatches(self, microbatches: int) -> None:
        """Raises MicrobatchesError if a loss needs a batch as a whole that is split.

        It gathers rows, or its layers assign to other variables than moments of BatchNormalization.
        """
        for loss in (*self.losses.values(), *self.means.values()):
            if microbatches > 1 and loss.training.gathers:
                raise gathers_error(loss.where)
            if microbatches > 1 and loss.training.moved:
                raise MicrobatchesError(
                    f"The forward pass of {loss.where} assigns to "
                    f"{' and '.join(loss.training.moved)}, once for the global batch"
                )

    def places(self, name: str, variables: Sequence[keras.Variable]) -> dict[str, list[int]]:
        """Returns which of some variables the optimizer of each group updates.

        Args:
          name: Name of an optimizer in the step.
          variables: Variables of a gradient.

        Raises:
          ConfigError: If the step applied other variables when the Trainer was made.
        """
        left = {id(v): place for place, v in enumerate(variables)}
        found = {
            group: sorted(left.pop(id(v)) for v in self.applied[group].variables if id(v) in left)
            for group in self.groups[name]
        }
        if left:
            others = ", ".join(v.path for v in variables if id(v) in left)
            raise ConfigError(
                f"The step applies gradients of {others}, which it did not when the Trainer was "
                "made. A step must apply the same gradients in each trace: leave out Python "
                "conditions on what changes, or use update.when."
            )
        return {group: own for group, own in found.items() if own}


def plan_built_in(task: Task, groups: Mapping[str, Mapping[str, Group]], loss_of: LossOf) -> Plan:
    """Returns the plan of `update.minimize(task.per_example, batch)`; builds the model.

    Raises:
      ConfigError: If there are several optimizers.
    """
    if len(groups) > 1:
        raise ConfigError(
            f"{type(task).__name__} has no `step`, which several optimizers need, got "
            f"{', '.join(groups)}. Pass one optimizer; or pass ParameterGroups, which name the "
            "variables of each; or give the task a method step(update, batch)."
        )
    (own,) = groups.values()
    loss = loss_of(task.per_example, "")
    assigned = assign(own, trainable_variables(task.model))
    applied = {name: Applied(variables, 1) for name, variables in assigned.items()}
    return Plan({BUILT_IN: loss}, {}, groups, applied, {"": 1})


def plan_own(
    task: Any,
    groups: Mapping[str, Mapping[str, Group]],
    loss_of: LossOf,
    strategy: tf.distribute.Strategy,
    pipelines: Mapping[str, BatchPipeline],
) -> Plan:
    """Rehearses a task's step and returns its plan; builds the task's models.

    Args:
      task: A task with a `step`.
      groups: The Trainer's optimizers (`ddl.optimizers.groups.groups_by_name`).
      loss_of: Probes a loss.
      strategy: The strategy.
      pipelines: The pipeline of each source, by its name.

    Raises:
      ConfigError: If the step misuses a verb, draws by Python or NumPy, applies nothing, leaves an
        optimizer or source unused, leaves out a trainable variable, or changes a variable that no
        checkpoint would hold.
    """
    rehearsal = _Rehearsal(task, list(groups), loss_of, strategy, pipelines)
    generators = Generators(task)
    before = generators.states()
    graph = rehearsal.graph()
    if generators.states() != before:
        check_python_draws(f"{type(task).__name__}.step", task, rehearsal.graph)
    check_stateless(f"{type(task).__name__}.step", graph)
    return _plan_of(task, rehearsal, graph, groups, strategy)


class _Rehearsal:
    """The engine of the verbs (`ddl.step.verbs.update.Engine`) while a step is rehearsed."""

    def __init__(
        self,
        task: Any,
        optimizers: Sequence[str],
        loss_of: LossOf,
        strategy: tf.distribute.Strategy,
        pipelines: Mapping[str, BatchPipeline],
    ):
        self.task = task
        self.optimizer_names = optimizers
        self.statistics: Sequence[tf.Variable] = ()
        self.strategy = strategy
        self.writes = False
        self.seed = 0
        self.losses: dict[str, Loss] = {}
        self.means: dict[str, Loss] = {}
        self.applies: list[tuple[str, Sequence[keras.Variable], bool]] = []
        self.averaged: list[tf.Variable] = []
        self.used: list[Any] = []
        self.batches: dict[str, int] = {}
        self.sources: set[str] = set()
        self._loss_of = loss_of
        self._pipelines = pipelines
        self._functions: dict[str, LossFunction] = {}

    def graph(self) -> tf.Graph:
        """Traces the step; returns its graph, which holds what the step itself computes."""
        self.losses, self.means, self.applies = dict(self.losses), dict(self.means), []
        self._functions.clear()  # a loss that is defined in the step is new in each trace

        def trace() -> None:
            state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
            state = TrainingState(*map(_unknown, state))
            batch = Batch({}, {}, batch_counter(state.batches))
            update = Update(self, state, dict.fromkeys(self._pipelines, batch))
            update.run(functools.partial(run_own_step, self.task))
            self.batches = update.batches.taken

        with self.strategy.scope(), microbatch.without_traces_of_the_user():
            return tf.function(trace, autograph=False).get_concrete_function().graph

    def loss(self, function: LossFunction, name: str, source: str, is_mean: bool) -> Loss:
        if self._functions.setdefault(name, function) != function:
            raise ConfigError(
                f"{type(self.task).__name__}.step: two losses have the name {name!r}. Pass "
                'name="…" to tell them apart in figures.'
            )
        self.sources.add(source)
        found = self.means if is_mean else self.losses
        if name not in found:
            with concurrent.futures.ThreadPoolExecutor(1) as outside:  # of this trace
                found[name] = outside.submit(self._loss_of, function, source).result()
        first, other = self._pipelines[found[name].source], self._pipelines[source]
        if (first.element_spec, first.global_batch_size) != (
            other.element_spec,
            other.global_batch_size,
        ):
            raise ConfigError(
                f"{type(self.task).__name__}.step computes the loss {name!r} of the sources "
                f"{found[name].source!r} and {source!r}, whose batches have other features, dtypes "
                'or sizes. Pass name="…" for one of them.'
            )
        return found[name]

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
        self.used += variables
        values = [_unknown(tf.zeros(v.shape, v.dtype)) for v in variables]
        return Reduced(values, None, None, loss.training.metrics.zeros())

    def sums(
        self, loss: Loss, batch: StepBatch, state: TrainingState, draws: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        zeros = tf.zeros([loss.training.entries], tf.float64)
        return _unknown(zeros), _unknown(tf.ones([], tf.float64))

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        return None

    def apply(
        self, optimizer: str, gradients: Gradients, state: TrainingState, in_branch: bool
    ) -> tf.Tensor:
        self.applies.append((optimizer, gradients.variables, in_branch))
        return tf.zeros([], tf.float64)

    def note_average(self, targets: Sequence[tf.Variable]) -> None:
        self.averaged += targets


def _unknown(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor without a static value, as the update has one when it is traced."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


def _plan_of(
    task: Any,
    rehearsal: _Rehearsal,
    graph: tf.Graph,
    groups: Mapping[str, Mapping[str, Group]],
    strategy: tf.distribute.Strategy,
) -> Plan:
    """Derives the plan from a rehearsal, and checks it."""
    name, layers = type(task).__name__, layers_of(task)
    own = own_variables_of(task, layers)
    of_layers = [v.value for layer in layers for v in layer.variables]
    optimizers = [one.optimizer for of_name in groups.values() for one in of_name.values()]
    saved = [*of_layers, *own, *(v.value for one in optimizers for v in one.variables)]
    assigned = written_in(graph, saved)
    _check_uses(name, rehearsal, groups)
    _check_variables(name, rehearsal, [*of_layers, *own], layers)
    check_writes(f"{name}.step", graph, task, optimizers, strategy)
    for variable in {id(v): v for v in [*own, *assigned]}.values():
        if not strategy.extended.variable_created_in_scope(variable):
            raise ConfigError(
                f"The variable {variable.name!r} of {name} was created outside the strategy's "
                "scope. Create the task under `with strategy.scope():`."
            )
    applied: dict[str, Applied] = {}
    for used, own_groups in groups.items():
        calls = [(variables, often) for of, variables, often in rehearsal.applies if of == used]
        every = list({id(v): v for variables, _ in calls for v in variables}.values())
        for group, updated in assign(own_groups, every).items():
            ids = {id(v) for v in updated}
            mine = [often for variables, often in calls if ids & {id(v) for v in variables}]
            applied[group] = Applied(updated, None if any(mine) else len(mine))
    return Plan(
        rehearsal.losses,
        rehearsal.means,
        groups,
        applied,
        rehearsal.batches,
        rehearsal.averaged,
        own,
        assigned,
    )


def _check_uses(name: str, rehearsal: _Rehearsal, groups: Mapping[str, Any]) -> None:
    """Raises ConfigError for a step that applies nothing, or leaves an optimizer or source."""
    if not rehearsal.applies:
        raise ConfigError(
            f"{name}.step applies no gradients, so it trains nothing. Call update.apply or "
            "update.minimize in it."
        )
    if unused := [one for one in groups if one not in {of for of, _, _ in rehearsal.applies}]:
        raise ConfigError(
            f"{name}.step never uses the optimizer {', '.join(map(repr, unused))}. Remove it from "
            "Trainer.optimizer, or name it in update.apply."
        )
    if idle := sorted(set(rehearsal.batches) - rehearsal.sources):
        raise ConfigError(
            f"{name}.step never uses the source {', '.join(map(repr, idle))}. Remove it from "
            "Trainer.train_data, or pass its batch to a method of update."
        )


def _check_variables(
    name: str,
    rehearsal: _Rehearsal,
    known: Sequence[tf.Variable],
    layers: Sequence[keras.layers.Layer],
) -> None:
    """Raises ConfigError for variables that the task does not hold, or that nothing changes."""
    applied = [v for _, variables, _ in rehearsal.applies for v in variables]
    ids = set(map(id, known))
    bare = {id(v.value): v.path for v in (*rehearsal.used, *applied)}
    bare |= {id(v): v.name for v in rehearsal.averaged}
    if unknown := [path for key, path in bare.items() if key not in ids]:
        raise ConfigError(
            f"{name}.step uses the variables {', '.join(unknown)}, but no attribute of {name} "
            "leads to them, so no checkpoint would hold them. Keep their layers in attributes of "
            "the task, or in lists and dicts in attributes."
        )
    changed = {id(v.value) for v in applied} | set(map(id, rehearsal.averaged))
    trainable = {id(v.value): v for layer in layers for v in layer.trainable_variables}
    if forgotten := [v.path for key, v in trainable.items() if key not in changed]:
        raise ConfigError(
            f"{name}.step changes no variable of {', '.join(forgotten)}, although they are "
            "trainable. Pass their layers to update.minimize or update.average, or set trainable "
            "= False on them."
        )
