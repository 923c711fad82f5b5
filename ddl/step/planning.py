"""The figures and changes of a task's step, known before the slots and the sums are laid out.

A step of the user's own is rehearsed: traced once with gradients and sums of unknown values, which
computes nothing and writes nothing. Each loss is probed (`ddl.step.probes`) when the step first
uses it. The trace of the training loop then runs the same code.
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
from ddl.step.gradients import trainable_variables
from ddl.step.loss import Loss
from ddl.step.moving_statistics import Statistics
from ddl.step.state import Pass, TrainingState
from ddl.step.update import Update
from ddl.tasks.gather import MicrobatchesError, gathers_error
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import LossFunction, Task

BUILT_IN = "per_example"
"""Name of the loss of the built-in step."""

LossOf = Callable[[LossFunction, str], Loss]
"""Probes a loss in training: takes the function and the name of the source."""


class Applied(NamedTuple):
    """The changes that a step makes with an optimizer.

    Attributes:
      variables: The variables, each once.
      times: Number of updates in a step; None if it depends on a tensor.
    """

    variables: list[keras.Variable]
    times: int | None


class Plan(NamedTuple):
    """The figures and changes of a step.

    Attributes:
      losses: The losses whose gradients it computes, by name.
      means: The functions that it averages or sums, by name.
      groups: Parameter groups of each optimizer of the step, by both names.
      applied: Its changes with the optimizer of each group, by the name of the group.
      batches: Number of batches that an update reads of each source, by its name.
      changed: Variables of the task that a step of its own changes, without slots.
    """

    losses: Mapping[str, Loss]
    means: Mapping[str, Loss]
    groups: Mapping[str, Mapping[str, Group]]
    applied: Mapping[str, Applied]
    batches: Mapping[str, int]
    changed: Sequence[tf.Variable] = ()

    @property
    def functions(self) -> list[Loss]:
        """The losses and the functions that are averaged."""
        return [*self.losses.values(), *self.means.values()]

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of all optimizers, each once."""
        every = [v for one in self.applied.values() for v in one.variables]
        return list({id(v): v for v in every}.values())

    @property
    def written(self) -> list[tf.Variable]:
        """The variables that a step of the task's own changes, with the slots, each once."""
        groups = [group for of_name in self.groups.values() for group in of_name.values()]
        slots = [v.value for group in groups for v in group.optimizer.variables]
        return list({id(v): v for v in [*self.changed, *slots]}.values())

    def frozen_until(self, group: str) -> int:
        """Returns the step from which a group's optimizer updates its variables."""
        return next(own for own in self.groups.values() if group in own)[group].frozen_until

    def check_microbatches(self, microbatches: int) -> None:
        """Raises MicrobatchesError if a loss needs a batch as a whole that is split.

        It gathers rows, or its layers assign to other variables than moments of BatchNormalization.
        """
        for loss in self.functions:
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
            raise does_other_things(f"applies gradients of {others}")
        return {group: own for group, own in found.items() if own}


def does_other_things(what: str) -> ConfigError:
    """Returns the error for a step that does what it did not do when the Trainer was made."""
    return ConfigError(
        f"The step {what}, which it did not when the Trainer was made. Leave out Python conditions "
        "on what changes, or use update.when."
    )


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
    name = type(task).__name__
    rehearsal = _Rehearsal(task, list(groups), loss_of, strategy, pipelines)
    before = states_of_generators(task)
    graph = rehearsal.graph()
    if states_of_generators(task) != before:
        check_python_draws(f"{name}.step", task, rehearsal.graph)
    check_stateless(f"{name}.step", graph)
    layers = layers_of(task)
    own = own_variables_of(task, layers)
    of_layers = [v.value for layer in layers for v in layer.variables]
    optimizers = [one.optimizer for of_name in groups.values() for one in of_name.values()]
    saved = [*of_layers, *own, *(v.value for one in optimizers for v in one.variables)]
    check_writes(f"{name}.step", graph, task, optimizers, strategy)
    rehearsal.check([*of_layers, *own], layers)
    assigned, update = written_in(graph, saved), rehearsal.update
    for variable in {id(v): v for v in [*own, *assigned]}.values():
        if not strategy.extended.variable_created_in_scope(variable):
            raise ConfigError(
                f"The variable {variable.name!r} of {name} was created outside the strategy's "
                "scope. Create the task under `with strategy.scope():`."
            )
    applied: dict[str, Applied] = {}
    for used, own_groups in groups.items():
        calls = [(variables, often) for of, variables, often in update.applied if of == used]
        every = list({id(v): v for variables, _ in calls for v in variables}.values())
        for group, updated in assign(own_groups, every).items():
            ids = {id(v) for v in updated}
            mine = [often for variables, often in calls if ids & {id(v) for v in variables}]
            applied[group] = Applied(updated, None if any(mine) else len(mine))
    trained = [v.value for one in applied.values() for v in one.variables]
    moved = Statistics(layers, strategy).variables
    changed = [*trained, *moved, *update.averaged, *own, *assigned]
    losses, means = rehearsal.losses, rehearsal.means
    return Plan(losses, means, groups, applied, update.taken, changed)


@dataclasses.dataclass
class _Rehearsal:
    """Computes nothing for the verbs of a step (`ddl.step.update.Update`), and notes their use."""

    task: Any
    optimizer_names: Sequence[str]
    loss_of: LossOf
    strategy: tf.distribute.Strategy
    pipelines: Mapping[str, BatchPipeline]
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)
    means: dict[str, Loss] = dataclasses.field(default_factory=dict)
    functions: dict[str, LossFunction] = dataclasses.field(default_factory=dict)
    sources: set[str] = dataclasses.field(default_factory=set)
    update: Any = None

    writes = False
    seed = 0
    statistics = ()

    def graph(self) -> tf.Graph:
        """Traces the step; returns its graph, which holds what the step itself computes."""
        self.functions.clear()  # a loss that is defined in the step is new in each trace

        def trace() -> None:
            state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
            state = TrainingState(*map(_unknown, state))
            batch = Batch({}, {}, batch_counter(state.batches))
            self.update = Update(self, state, dict.fromkeys(self.pipelines, batch))
            self.update.run(self.task)

        with self.strategy.scope(), microbatch.without_traces_of_the_user():
            return tf.function(trace, autograph=False).get_concrete_function().graph

    def loss(self, function: LossFunction, name: str, source: str, is_mean: bool) -> Loss:
        self.sources.add(source)
        found = self.means if is_mean else self.losses
        if name not in found:
            with concurrent.futures.ThreadPoolExecutor(1) as outside:  # of this trace
                found[name] = outside.submit(self.loss_of, function, source).result()
        first, other = self.pipelines[found[name].source], self.pipelines[source]
        other_data = first.element_spec != other.element_spec
        other_data |= first.global_batch_size != other.global_batch_size
        if self.functions.setdefault(name, function) != function or other_data:
            raise ConfigError(
                f"{type(self.task).__name__}.step: two losses have the name {name!r}, or one has "
                'it for sources of other features or batch sizes. Pass name="…" for one of them.'
            )
        return found[name]

    def gradient(
        self, loss: Loss, variables: Sequence[keras.Variable], made: Pass, in_shares: bool
    ) -> Reduced:
        values = [_unknown(tf.zeros(v.shape, v.dtype)) for v in variables]
        return Reduced(values, None, None, loss.training.metrics.zeros())

    def sums(self, loss: Loss, made: Pass) -> tuple[tf.Tensor, tf.Tensor]:
        zeros = tf.zeros([loss.training.entries], tf.float64)
        return _unknown(zeros), _unknown(tf.ones([], tf.float64))

    def finite(self, values: Sequence[Any]) -> None:
        return None

    def apply(self, *_: Any) -> tf.Tensor:
        return tf.zeros([], tf.float64)

    def check(self, known: Sequence[tf.Variable], layers: Sequence[keras.layers.Layer]) -> None:
        """Raises ConfigError for what the step leaves out, or what no attribute leads to."""
        name, update = f"{type(self.task).__name__}.step", self.update
        if not update.applied:
            raise ConfigError(f"{name} applies no gradients: call update.apply or update.minimize.")
        if unused := set(self.optimizer_names) - {optimizer for optimizer, _, _ in update.applied}:
            raise ConfigError(f"{name} never uses the optimizer {min(unused)!r}: apply by it.")
        if idle := set(self.pipelines) - self.sources:
            raise ConfigError(f"{name} never uses the source {min(idle)!r}: pass its batch.")
        applied = {id(v.value): v.path for _, variables, _ in update.applied for v in variables}
        changed = applied | {id(v): v.name for v in update.averaged}
        ids = set(map(id, known))
        if unknown := [path for key, path in changed.items() if key not in ids]:
            raise ConfigError(
                f"{name} changes the variables {', '.join(unknown)}, but no attribute of the task "
                "leads to them, so no checkpoint would hold them. Keep their layers in attributes."
            )
        trainable = {id(v.value): v for layer in layers for v in layer.trainable_variables}
        if forgotten := [v.path for key, v in trainable.items() if key not in changed]:
            raise ConfigError(
                f"{name} changes no variable of {', '.join(forgotten)}, although they are "
                "trainable. Pass them to update.minimize, or set trainable = False on their layers."
            )


def _unknown(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor without a static value, as the update has one when it is traced."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)
