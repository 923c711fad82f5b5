"""The plan of a step: its losses and the variables that it changes, known before training."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_takes, did_you_mean
from ddl.optimizers.groups import ONLY, Group
from ddl.step.objective import Objective
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.misuse import explained
from ddl.tasks.gather import MicrobatchesError, gathers_error
from ddl.tasks.task import LossFunction, Task, has_step

BUILT_IN = "per_example"
"""Name of the loss of the built-in step."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The losses of a step and the variables that it changes.

    Attributes:
      task: The task.
      losses: The objective of each loss, by the name of the loss.
      groups: For each name of an optimizer in the step, its parameter groups by the name of the
        group's optimizer; one group with the same name if there are no groups.
      variables: The variables that each optimizer updates, by the name of the optimizer.
      applies: Number of updates that each optimizer makes in a step, once it is not frozen; None if
        it depends on a tensor.
      means: The objective of each function that the step averages or sums, by its name.
      only_moved: Names of the losses that the step computes within `moved` alone.
      sources: Name of the source of each loss and function, by its name.
      batches: Number of batches that an update reads of each source, by its name.
      calls: Identity of each call of a verb in the trace before training
        (`ddl.step.verbs.work.Call`); empty for the built-in step.
      changes: Number of the step's calls that change variables: `apply` and `average`.
      keeps_values: Whether the values before the update must be kept under loss scaling, because a
        variable changes before the last gradient is known, or the step itself assigns to it.
      averaged: Variables that `average` changes.
      own: Variables that the task keeps outside of its layers.
      frozen: Weights of layers that no verb changes; the step may assign to them.
      assigned: Saved variables that the step itself assigns, such as a learning rate.
    """

    task: Task
    losses: Mapping[str, Objective]
    groups: Mapping[str, Mapping[str, Group]]
    variables: Mapping[str, list[keras.Variable]]
    applies: Mapping[str, int | None]
    means: Mapping[str, Objective] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=lambda: {BUILT_IN: ""})
    batches: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"": 1})
    calls: Sequence[tuple[str, str, bool]] = ()
    changes: int = 1
    keeps_values: bool = False
    only_moved: Collection[str] = ()
    averaged: Sequence[tf.Variable] = ()
    own: Sequence[tf.Variable] = ()
    frozen: Sequence[tf.Variable] = ()
    assigned: Sequence[tf.Variable] = ()

    @property
    def run(self) -> Callable[[Any, Any], None]:
        """The step: takes the update and the batch, in cross-replica context, in a graph."""
        if has_step(self.task):
            return lambda update, batch: run_own_step(self.task, update, batch)
        return lambda update, batch: update.minimize(self.task.per_example, batch, name=BUILT_IN)

    @property
    def ends_with_last_change(self) -> bool:
        """Whether the last change also moves the weight averages, or undoes a skipped update."""
        return not (self.keeps_values or self.own or self.frozen or self.assigned)

    @property
    def objectives(self) -> list[Objective]:
        """The objectives of all losses, and of all functions of which the step takes the mean."""
        return [*self.losses.values(), *self.means.values()]

    def check_trace(self, calls: Sequence[tuple[str, str, bool]], taken: Mapping[str, int]) -> None:
        """Checks that a trace has made the calls, and read the batches, of that before training.

        Args:
          calls: Identity of each call of a verb that it has made.
          taken: Number of batches that it has read of each source.

        Raises:
          ConfigError: If they differ.
        """
        if self.calls and list(calls) != list(self.calls):
            pairs = enumerate(itertools.zip_longest(calls, self.calls), start=1)
            number, (ours, planned) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            raise ConfigError(
                f"{type(self.task).__name__}.step makes other calls of update than when the "
                f"Trainer was made: call {number} is {_described(ours)}, but was "
                f"{_described(planned)}. A step must make the same calls in each trace: leave out "
                "Python conditions on what changes, or use update.when."
            )
        if taken != self.batches:
            raise ConfigError(
                f"{type(self.task).__name__}.step calls update.next as often as for the batches "
                f"{taken}, got {dict(self.batches)} when the Trainer was made. A step must read "
                "the same batches in each trace."
            )

    def check_microbatches(self, microbatches: int) -> None:
        """Raises MicrobatchesError if a loss needs a batch as a whole that is split.

        It gathers rows, or its layers assign to other variables than moments of BatchNormalization.
        """
        for name, objective in {**self.losses, **self.means}.items():
            if microbatches > 1 and objective.gathers:
                raise gathers_error(f"{type(self.task).__name__}.{name}")
            if microbatches > 1 and objective.moved:
                raise MicrobatchesError(
                    f"The forward pass of {type(self.task).__name__}.{name} assigns to "
                    f"{' and '.join(objective.moved)}, once for the global batch"
                )

    def objectives_of(self, source: str) -> list[Objective]:
        """Returns the objectives of what the step computes of a source's batches."""
        every = {**self.losses, **self.means}
        return [every[name] for name, own in self.sources.items() if own == source]

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of all optimizers, each once."""
        every = [v for variables in self.variables.values() for v in variables]
        return list({id(v): v for v in every}.values())

    def known(self, layers: Sequence[keras.layers.Layer]) -> list[keras.Variable]:
        """Returns the variables that a loss of a step may depend on: those of the task's layers."""
        return [*self.trained, *(v for layer in layers for v in layer.variables)]

    def parts(self, name: str, variables: Sequence[keras.Variable]) -> dict[str, list[int]]:
        """Returns which of the variables each optimizer of a name updates.

        Args:
          name: Name of an optimizer in the step.
          variables: Variables of a gradient.

        Returns:
          Places in `variables` by the name of the optimizer, without optimizers that have none.

        Raises:
          ConfigError: If the step applied other variables when the Trainer was made.
        """
        places = {id(v): place for place, v in enumerate(variables)}
        found = {
            optimizer: [places.pop(id(v)) for v in self.variables[optimizer] if id(v) in places]
            for optimizer in self.groups[name]
        }
        if places:
            others = ", ".join(v.path for v in variables if id(v) in places)
            raise ConfigError(
                f"{type(self.task).__name__}.step applies gradients of {others}, which it did not "
                "when the Trainer was made. A step must apply the same gradients in each trace."
            )
        return {optimizer: sorted(own) for optimizer, own in found.items() if own}

    def frozen_until(self, optimizer: str) -> int:
        """Returns the step from which an optimizer updates its variables."""
        groups = (own for own in self.groups.values() if optimizer in own)
        return next(groups)[optimizer].frozen_until

    def to_restore(self, optimizers: Mapping[str, keras.optimizers.Optimizer]) -> list[tf.Variable]:
        """Returns the variables that a skipped update restores, besides statistics."""
        if not self.keeps_values:
            return [*self.own, *self.assigned]
        weights = [v.value for v in self.trained]
        slots = [v.value for optimizer in optimizers.values() for v in optimizer.variables]
        return [*weights, *slots, *self.averaged, *self.own, *self.assigned]

    def name_of_loss(self, loss: LossFunction, name: str | None) -> str:
        """Returns the name of a loss."""
        return name_of_loss(self.task, loss, name)

    def name_of_optimizer(self, name: str | None) -> str:
        """Returns the name of an optimizer; None means the only one."""
        return name_of_optimizer(self.task, list(self.groups), name)

    def model(self, given: Any) -> Any:
        """Returns the model of a verb; None means the task's `model`."""
        return model_of(self.task, given)


def _described(call: tuple[str, str, bool] | None) -> str:
    """Returns a call of a verb for an error."""
    if call is None:
        return "missing"
    verb, name, sometimes = call
    return f"{verb} {name}".rstrip() + (" within when" if sometimes else "")


def name_of_loss(task: Any, loss: Any, name: str | None) -> str:
    """Returns the name of a loss: the given one, or that of the function.

    Raises:
      ConfigError: If the loss is not a function, or has no name.
    """
    where = f"{type(task).__name__}.step"
    if not callable(loss):
        raise ConfigError(
            f"{where}: a loss must be a function of features and training that returns a "
            f"ddl.PerExample, such as self.per_example, got {loss!r:.80}. Pass the function "
            "without calling it."
        )
    name = getattr(loss, "__name__", None) if name is None else name
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{where}: a loss, or the function of a mean or sum, needs a name of letters, digits "
            f"and underscores, got {name!r} for {loss!r:.80}. "
            'Pass name="…", or make it a method of the task.'
        )
    check_takes(f"{type(task).__name__}.{name}", loss, ("features",), ("training",))
    return name


def name_of_optimizer(task: Any, names: Sequence[str], name: str | None) -> str:
    """Returns the name of an optimizer; None means the only one.

    Raises:
      ConfigError: If there is no optimizer of this name, or no name although there are several.
    """
    where = f"{type(task).__name__}.step"
    if name in names:
        return str(name)
    if name is not None and not isinstance(name, str):
        raise ConfigError(
            f"{where}: optimizer must be the name of an optimizer, a text, got {name!r:.80}. The "
            "optimizers themselves belong to the Trainer: pass it a dict from name to optimizer."
        )
    if name is not None:
        known = "only one, without a name" if list(names) == [ONLY] else ", ".join(names)
        raise ConfigError(
            f"{where}: there is no optimizer {name!r}; the Trainer has {known}."
            f"{did_you_mean(name, names)} Pass a dict of optimizers to the Trainer to name them."
        )
    if len(names) > 1:
        raise ConfigError(
            f"{where}: the Trainer has the optimizers {', '.join(names)}. Name one of them, "
            f'such as optimizer="{names[0]}".'
        )
    return names[0]


def model_of(task: Any, given: Any) -> Any:
    """Returns the given model, or the task's `model`.

    Raises:
      ConfigError: If there is neither.
    """
    if given is not None:
        return given
    if not hasattr(task, "model"):
        name = type(task).__name__
        raise ConfigError(
            f"{name}.step: {name} has no `model`, so each call must name the model, layer or "
            "variables, such as update.minimize(loss, batch, self.generator)."
        )
    return task.model


def run_own_step(task: Any, update: Any, batch: Any) -> None:
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

    classes = {"update": type(update), "gradients": Gradients}
    with explained(task, classes), tf.variable_creator_scope(refuse):
        task.step(update, batch)
