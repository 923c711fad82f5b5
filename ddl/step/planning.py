"""The figures and changes of a task's step, known before the slots and the sums are laid out.

A step of the user's own is rehearsed: traced once with gradients and sums of unknown values, which
computes little and runs nothing. The rehearsal gives what must be known before the update itself is
traced: the losses, whose metric sums the loop carries; the variables of each optimizer, whose slots
it writes; and all variables that a skipped update restores. Each loss is probed
(`ddl.step.probes`) when the step first uses it.
"""

import concurrent.futures
import dataclasses
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
    check_python_draws,
    check_stateless,
    check_writes,
    states_of_generators,
    written_in,
)
from ddl.step.global_gradient import Reduced
from ddl.step.gradients import Variables, trainable_variables
from ddl.step.loss import Loss
from ddl.step.moving_statistics import Statistics
from ddl.step.state import Pass, TrainingState
from ddl.step.update import Update
from ddl.tasks.gather import MicrobatchesError, gathers_error
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import LossFunction, Task

BUILT_IN = "per_example"
"""Name of the loss of the built-in step."""

Groups = Mapping[str, Mapping[str, Group]]
"""The Trainer's optimizers by both names (`ddl.optimizers.groups.groups_by_name`)."""

LossOf = Callable[[LossFunction, str], Loss]
"""Probes a loss in training: takes the function and the name of the source."""


class Part(NamedTuple):
    """An optimizer, and its part of the trained variables.

    Attributes:
      optimizer: The optimizer.
      variables: The variables that it updates, each once.
      times: Number of its updates in a step; None if that depends on a tensor.
      frozen_until: First step at which it updates its variables.
    """

    optimizer: keras.optimizers.Optimizer
    variables: Variables
    times: int | None
    frozen_until: int

    def places(self, variables: Variables) -> list[int]:
        """Returns which of some variables it updates."""
        own = set(map(id, self.variables))
        return [place for place, variable in enumerate(variables) if id(variable) in own]


@dataclasses.dataclass
class Plan:
    """The figures and changes of a step.

    Attributes:
      groups: The parameter groups of each optimizer of the step, by both names.
      losses: The losses whose gradients it computes, by name.
      means: The functions that it averages or sums, by name.
      applied: The optimizer of each group with its variables, by the name of the group.
      batches: Number of batches that an update reads of each source, by its name.
      changed: Variables of the task that a step of its own changes.
    """

    groups: Groups
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)
    means: dict[str, Loss] = dataclasses.field(default_factory=dict)
    applied: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    batches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    changed: Sequence[tf.Variable] = ()

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of all optimizers, each once."""
        return _once(v for part in self.applied.values() for v in part.variables)

    def check_microbatches(self, microbatches: int) -> None:
        """Raises MicrobatchesError if a loss needs a batch as a whole that is split.

        It gathers rows, or its layers assign to other variables than moments of BatchNormalization.
        """
        for loss in (*self.losses.values(), *self.means.values()) if microbatches > 1 else ():
            if loss.training.gathers:
                raise gathers_error(loss.where)
            if moved := loss.training.moved:
                raise MicrobatchesError(
                    f"The forward pass of {loss.where} assigns to {' and '.join(moved)}, once for "
                    "the global batch"
                )

    def parts(self, name: str, variables: Variables) -> list[Part]:
        """Returns the parts of an optimizer of the step that update some of the variables.

        Args:
          name: Name of the optimizer in the step.
          variables: Variables of a gradient.

        Raises:
          ConfigError: If the step applied other variables when the Trainer was made.
        """
        parts = [self.applied[group] for group in self.groups[name]]
        known = {id(v) for part in parts for v in part.variables}
        if others := [v.path for v in variables if id(v) not in known]:
            raise does_other_things(f"applies gradients of {', '.join(others)}")
        return [part for part in parts if part.places(variables)]


def does_other_things(what: str) -> ConfigError:
    """Returns the error for a step that does what it did not do when the Trainer was made."""
    return ConfigError(
        f"The step {what}, which it did not when the Trainer was made. Leave out Python conditions "
        "on what changes, or use update.when."
    )


def plan_built_in(task: Task, groups: Groups, loss_of: LossOf) -> Plan:
    """Returns the plan of `update.minimize(task.per_example, batch)`; builds the model.

    Raises:
      ConfigError: If there are several optimizers.
    """
    if len(groups) > 1:
        raise ConfigError(
            f"{type(task).__name__} has no `step`, which several optimizers need, got "
            f"{', '.join(groups)}. Pass one optimizer or ParameterGroups, or give the task a step."
        )
    (name,), losses = groups, {BUILT_IN: loss_of(task.per_example, "")}
    applied = _applied(groups, [(name, trainable_variables(task.model), False)])
    return Plan(groups, losses, applied=applied, batches={"": 1})


def plan_own(
    task: Any,
    groups: Groups,
    loss_of: LossOf,
    strategy: tf.distribute.Strategy,
    pipelines: Mapping[str, BatchPipeline],
) -> Plan:
    """Rehearses a task's step and returns its plan; builds the task's models.

    Args:
      task: A task with a `step`.
      groups: The Trainer's optimizers.
      loss_of: Probes a loss.
      strategy: The strategy.
      pipelines: The pipeline of each source, by its name.

    Raises:
      ConfigError: If the step misuses a verb, draws by Python or NumPy, applies nothing, leaves an
        optimizer or source unused, leaves out a trainable variable, or changes a variable that no
        checkpoint would hold.
    """
    where, plan = f"{type(task).__name__}.step", Plan(groups)
    rehearsal = _Rehearsal(task, plan, loss_of, strategy, pipelines, Statistics((), strategy))
    before = states_of_generators(task)
    graph, update = rehearsal.graph(), rehearsal.update
    if states_of_generators(task) != before:
        check_python_draws(where, task, rehearsal.graph)
    check_stateless(where, graph)
    layers = layers_of(task)
    own = own_variables_of(task, layers)
    known = [*(v.value for layer in layers for v in layer.variables), *own]
    optimizers = [one.optimizer for of_name in groups.values() for one in of_name.values()]
    check_writes(where, graph, task, optimizers, strategy)
    _check_complete(task, update, groups, known)
    slots = [v.value for one in optimizers for v in one.variables]
    assigned = written_in(graph, [*known, *slots])
    for variable in [*own, *assigned]:
        if not strategy.extended.variable_created_in_scope(variable):
            raise ConfigError(
                f"{where}: the variable {variable.name!r} was created outside the strategy's scope."
                " Create the task under `with strategy.scope():`."
            )
    plan.applied, plan.batches = _applied(groups, update.applied), update.taken
    trained, moving = [v.value for v in plan.trained], Statistics(layers, strategy).variables
    plan.changed = _once([*trained, *moving, *own, *assigned])
    return plan


def _applied(groups: Groups, calls: Sequence[tuple[str, Variables, bool]]) -> dict[str, Part]:
    """Returns the parts of all optimizers, for the calls of `Update.applied`.

    Raises:
      ConfigError: If groups do not fit the variables.
    """
    found = {}
    for name, of_name in groups.items():
        own = [(variables, in_branch) for of, variables, in_branch in calls if of == name]
        every = _once(v for variables, _ in own for v in variables)
        for group, updated in assign(of_name, every).items():
            ids = set(map(id, updated))
            varies = [in_branch for variables, in_branch in own if ids & set(map(id, variables))]
            times, one = None if any(varies) else len(varies), of_name[group]
            found[group] = Part(one.optimizer, updated, times, one.frozen_until)
    return found


def _once(items: Any) -> list[Any]:
    return list({id(item): item for item in items}.values())


class _UnknownGradient:
    """Stands for `GlobalGradient` in a rehearsal."""

    def __call__(self, loss: Loss, variables: Variables, made: Pass, in_shares: bool) -> Reduced:
        values = [_unknown(tf.zeros(v.shape, v.dtype)) for v in variables]
        return Reduced(values, None, None, loss.training.metrics.zeros())

    def sums(self, loss: Loss, made: Pass) -> tuple[tf.Tensor, tf.Tensor]:
        zeros = tf.zeros([loss.training.entries], tf.float64)
        return _unknown(zeros), _unknown(tf.ones([], tf.float64))

    def finite(self, values: Sequence[Any]) -> None:
        return None


@dataclasses.dataclass
class _Rehearsal:
    """Computes nothing for the verbs of a step (`ddl.step.update.Update`), and notes its losses."""

    task: Any
    plan: Plan
    loss_of: LossOf
    strategy: tf.distribute.Strategy
    pipelines: Mapping[str, BatchPipeline]
    moving: Statistics
    gradient = _UnknownGradient()
    update: Any = None

    def graph(self) -> tf.Graph:
        """Traces the step; returns its graph, which holds what the step itself computes."""

        def trace() -> None:
            state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
            state = TrainingState(*map(_unknown, state))
            batch = Batch({}, {}, batch_counter(state.batches))
            self.update = Update(self, state, dict.fromkeys(self.pipelines, batch))
            self.update.run()

        with self.strategy.scope(), microbatch.without_traces_of_the_user():
            return tf.function(trace, autograph=False).get_concrete_function().graph

    def loss(self, known: dict[str, Loss], function: LossFunction, name: str, source: str) -> Loss:
        if name not in known:
            with concurrent.futures.ThreadPoolExecutor(1) as outside:  # of this trace
                known[name] = outside.submit(self.loss_of, function, source).result()
        return known[name]

    def apply(self, *_: Any) -> tf.Tensor:
        return tf.zeros([], tf.float64)


def _check_complete(
    task: Any, update: Update, groups: Groups, known: Sequence[tf.Variable]
) -> None:
    """Raises ConfigError for what the step leaves out, or what no attribute leads to."""
    where = f"{type(task).__name__}.step"
    if not update.applied:
        raise ConfigError(f"{where} applies no gradients: call update.apply or update.minimize.")
    if unused := groups.keys() - {optimizer for optimizer, _, _ in update.applied}:
        raise ConfigError(f"{where} never uses the optimizer {min(unused)!r}: apply by it.")
    if idle := update.taken.keys() - update.used:
        raise ConfigError(f"{where} never uses the source {min(idle)!r}: pass its batch.")
    changed = {id(v.value): v.path for _, variables, _ in update.applied for v in variables}
    changed |= {id(v): v.name for v in update.averaged}
    ids = set(map(id, known))
    if unknown := [path for key, path in changed.items() if key not in ids]:
        raise ConfigError(
            f"{where} changes the variables {', '.join(unknown)}, but no attribute of the task "
            "leads to them, so no checkpoint would hold them. Keep their layers in attributes."
        )
    trainable = {id(v.value): v for x in layers_of(task) for v in x.trainable_variables}
    if forgotten := [v.path for key, v in trainable.items() if key not in changed]:
        raise ConfigError(
            f"{where} changes no variable of {', '.join(forgotten)}, although they are trainable. "
            "Pass them to update.minimize, or set trainable = False on their layers."
        )


def _unknown(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor without a static value, as the update has one when it is traced."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)
