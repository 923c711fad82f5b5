"""The figures and changes of a task's step, known before the slots and the sums are laid out.

A step of the user's own is rehearsed: traced once with gradients and sums of unknown values, which
computes little and runs nothing. The rehearsal gives what must be known before the update itself is
traced: the losses, whose metric sums the loop carries, and the variables of each optimizer, whose
slots it writes. Each loss is probed (`ddl.training.probes`) when the step first uses it.
"""

import concurrent.futures
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.optimizers.groups import Group, Optimizers, assign, groups_by_name
from ddl.random import batch_counter
from ddl.step.effects import (
    check_python_draws,
    check_stateless,
    check_writes,
    states_of_generators,
)
from ddl.step.global_gradient import Reduced
from ddl.step.gradients import Variables, trainable_variables
from ddl.step.loss import Loss
from ddl.step.state import Pass, TrainingState
from ddl.step.update import Update
from ddl.tasks.gather import MicrobatchesError, gathers_error
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import LossFunction, Task, has_step

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
    """

    optimizer: keras.optimizers.Optimizer
    variables: Variables
    times: int | None

    def places(self, variables: Variables) -> list[int]:
        """Returns which of some variables it updates."""
        own = set(map(id, self.variables))
        return [place for place, variable in enumerate(variables) if id(variable) in own]


@dataclasses.dataclass
class Plan:
    """The figures and changes of a step.

    Attributes:
      groups: The parameter groups of each optimizer of the step, by both names.
      loss_of: Probes a loss.
      losses: The losses whose gradients it computes, by name.
      means: The functions that it averages or sums, by name.
      applied: The optimizer of each group with its variables, by the name of the group.
      batches: Number of batches that an update reads of each source, by its name.
      calls: What a step of its own calls (`ddl.step.update.Update.calls`), in each trace the same.
      inputs: Specs of the arguments of each subclassed model that a loss calls, by its id.
    """

    groups: Groups
    loss_of: LossOf
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)
    means: dict[str, Loss] = dataclasses.field(default_factory=dict)
    applied: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    batches: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"": 1})
    calls: Any = None
    inputs: Mapping[int, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of all optimizers, each once."""
        return _once(v for part in self.applied.values() for v in part.variables)

    @property
    def normalizing(self) -> list[keras.layers.BatchNormalization]:
        """The layers that take moments of a microbatch in training."""
        losses = (*self.losses.values(), *self.means.values())
        every = _once(layer for one in losses for layer in one.form.layers)
        return [x for x in every if isinstance(x, keras.layers.BatchNormalization)]

    def loss(self, known: dict[str, Loss], function: LossFunction, name: str, source: str) -> Loss:
        """Returns the loss of a function in this trace; probes it when its name is new.

        Args:
          known: `losses` or `means`.
          function: The function, which each trace may define anew.
          name: Name of the loss.
          source: Name of the source of its examples.
        """
        if name not in known:
            policy = keras.config.dtype_policy()  # of this thread
            with concurrent.futures.ThreadPoolExecutor(
                1, initializer=keras.config.set_dtype_policy, initargs=(policy,)
            ) as outside:  # of the trace
                known[name] = outside.submit(self.loss_of, function, source).result()
        return known[name].of(function)

    def check_microbatches(self, microbatches: int) -> None:
        """Raises MicrobatchesError if a loss needs a batch as a whole that is split.

        It gathers rows, or its layers assign to other variables than moments of BatchNormalization.
        """
        for loss in (*self.losses.values(), *self.means.values()) if microbatches > 1 else ():
            if loss.form.gathers:
                raise gathers_error(loss.where)
            if moved := loss.form.moved:
                raise MicrobatchesError(
                    f"The forward pass of {loss.where} assigns to {' and '.join(moved)}, once for "
                    "the global batch"
                )


def plan_of(
    task: Task,
    optimizer: Optimizers,
    loss_of: LossOf,
    strategy: tf.distribute.Strategy,
    pipelines: Mapping[str, BatchPipeline],
) -> Plan:
    """Returns the plan of a task's step, which it rehearses, or of the built-in one.

    The built-in step is `update.minimize(task.per_example, batch)`. Builds the task's models.

    Args:
      task: The task.
      optimizer: As `ddl.Trainer` takes it.
      loss_of: Probes a loss.
      strategy: The strategy.
      pipelines: The pipeline of each source, by its name; learns how many batches an update reads.

    Raises:
      ConfigError: If several optimizers or sources have no step; the strategy runs none; a loss
        needs a batch as a whole that is split; a variable was made outside of the scope; or the
        step misuses a verb, draws by Python or NumPy, applies nothing, leaves an optimizer or
        source unused, leaves out a trainable variable, or changes a variable that no checkpoint
        would hold.
    """
    groups, name, own = groups_by_name(optimizer), type(task).__name__, []
    plan = Plan(groups, loss_of)
    has_groups = any(len(of_name) > 1 for of_name in groups.values())
    if traits_of(strategy).asynchronous and (has_step(task) or has_groups):
        what = f"{name}.step" if has_step(task) else "ParameterGroups"
        raise ConfigError(
            f"--strategy=parameter_server cannot run {what}: its workers make the updates of one "
            "optimizer, each from a batch of its own. Use another strategy."
        )
    if not has_step(task) and list(pipelines) != [""]:
        raise ConfigError(
            f"{name} has no `step`, which several sources in Trainer.train_data need, got "
            f"{', '.join(pipelines)}. Pass one, or give the task a method step(update, batch)."
        )
    if not has_step(task) and len(groups) > 1:
        raise ConfigError(
            f"{name} has no `step`, which several optimizers need, got "
            f"{', '.join(groups)}. Pass one optimizer or ParameterGroups, or give the task a step."
        )
    with _recording_inputs(task) as plan.inputs:
        if has_step(task):
            applied = _rehearsed(task, plan, strategy, pipelines)
            own = own_variables_of(task, layers_of(task))  # built by now
        else:
            plan.losses[BUILT_IN] = loss_of(task.per_example, "")
            applied = [(one, trainable_variables(task.model), False) for one in groups]
    plan.applied = _parts(groups, applied)
    for variable in [*(v.value for v in plan.trained), *own]:
        if not strategy.extended.variable_created_in_scope(variable):
            raise ConfigError(
                f"The variable {variable.name!r} of {name} was created outside the "
                "strategy's scope. Create the model and the task under `with strategy.scope():`."
            )
    for source, pipeline in pipelines.items():
        pipeline.batches_per_update = plan.batches[source]
    plan.check_microbatches(next(iter(pipelines.values())).microbatches)
    return plan


def _rehearsed(
    task: Any,
    plan: Plan,
    strategy: tf.distribute.Strategy,
    pipelines: Mapping[str, BatchPipeline],
) -> list[tuple[str, Variables, bool]]:
    """Rehearses and checks the task's own step; returns what it applies (`Update.applied`)."""
    rehearsal, where = _Rehearsal(task, plan, strategy, pipelines), f"{type(task).__name__}.step"
    before = states_of_generators(task)
    graph, update = rehearsal.graph(), rehearsal.update
    if states_of_generators(task) != before:
        check_python_draws(where, task, rehearsal.graph)
    check_stateless(where, graph)
    optimizers = [x.optimizer for of_name in plan.groups.values() for x in of_name.values()]
    check_writes(where, graph, task, optimizers, strategy)
    own = own_variables_of(task, layers_of(task))
    _check_complete(where, task, update, plan.groups, own)
    plan.batches, plan.calls = update.taken, update.calls
    return list(update.applied)


def may_depend_on(
    task: Task, plan: Plan, layers: Sequence[keras.layers.Layer]
) -> list[keras.Variable]:
    """Returns the variables on which a loss may depend besides those of its gradient.

    These are the frozen ones, or with a step of the task's own all of its layers and optimizers.
    """
    if has_step(task):
        return [*plan.trained, *(v for layer in layers for v in layer.variables)]
    own = [(layer, v) for layer in layers for v in layer._trainable_variables]
    trained = {id(v) for layer, v in own if layer.trainable and v.trainable}
    return [v for _, v in own if id(v) not in trained]


def _parts(groups: Groups, applied: Sequence[tuple[str, Variables, bool]]) -> dict[str, Part]:
    """Returns the parts of all optimizers, for the calls of `Update.applied`."""
    found = {}
    for name, of_name in groups.items():
        own = [(variables, in_branch) for of, variables, in_branch in applied if of == name]
        every = _once(v for variables, _ in own for v in variables)
        for group, updated in assign(of_name, every).items():
            ids = set(map(id, updated))
            varies = [in_branch for variables, in_branch in own if ids & set(map(id, variables))]
            times = None if any(varies) else len(varies)
            found[group] = Part(of_name[group].optimizer, updated, times)
    return found


def _once(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


@dataclasses.dataclass
class _Rehearsal:
    """Stands for `TrainStep` and its `GlobalGradient`: computes nothing for the verbs of a step."""

    task: Any
    plan: Plan
    strategy: tf.distribute.Strategy
    pipelines: Mapping[str, BatchPipeline]
    moving: Sequence[tf.Variable] = ()
    update: Any = None

    def graph(self) -> tf.Graph:
        """Traces the step; returns its graph, which holds what the step itself computes."""

        def trace(state: TrainingState) -> None:
            batch = Batch({}, {}, batch_counter(state.batches))
            self.update = Update(self, state, dict.fromkeys(self.pipelines, batch))
            self.update.run()

        state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
        with self.strategy.scope(), microbatch.without_traces_of_the_user():
            return tf.function(trace, autograph=False).get_concrete_function(state).graph

    @property
    def gradient(self) -> "_Rehearsal":
        return self

    def __call__(self, loss: Loss, variables: Variables, made: Pass, in_shares: bool) -> Reduced:
        values = [tf.zeros(v.shape, v.dtype) for v in variables]
        if made.each is not None:
            made.each(values)  # for the checks of the graph
        return Reduced(values, None, None, loss.form.metrics.zeros())

    def sums(self, loss: Loss, made: Pass) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.zeros([loss.form.entries], tf.float64), tf.ones([], tf.float64)

    def finite(self, values: Sequence[Any]) -> None:
        return None

    def apply(self, *_: Any) -> tf.Tensor:
        return tf.zeros([], tf.float64)


def _check_complete(
    where: str, task: Any, update: Update, groups: Groups, own: Sequence[tf.Variable]
) -> None:
    """Raises ConfigError for what the step leaves out, or what no attribute leads to."""
    if not update.applied:
        raise ConfigError(f"{where} applies no gradients: call update.apply or update.minimize.")
    if unused := groups.keys() - {optimizer for optimizer, _, _ in update.applied}:
        raise ConfigError(f"{where} never uses the optimizer {min(unused)!r}: apply by it.")
    if idle := update.taken.keys() - {source for _, source in update.functions.values()}:
        raise ConfigError(f"{where} never uses the source {min(idle)!r}: pass its batch.")
    changed = {id(v.value): v.path for _, variables, _ in update.applied for v in variables}
    changed |= {id(v): v.name for v in update.averaged}
    layers = layers_of(task)
    known = set(map(id, [*(v.value for layer in layers for v in layer.variables), *own]))
    if unknown := [path for key, path in changed.items() if key not in known]:
        raise ConfigError(
            f"{where} changes the variables {', '.join(unknown)}, but no attribute of the task "
            "leads to them, so no checkpoint would hold them. Keep their layers in attributes."
        )
    trainable = (v for layer in layers for v in layer.trainable_variables)
    if forgotten := _once(v.path for v in trainable if id(v.value) not in changed):
        raise ConfigError(
            f"{where} changes no variable of {', '.join(forgotten)}, although they are trainable. "
            "Pass them to update.minimize, or set trainable = False on their layers."
        )


# ------------------------------------------------------------ inputs of models


@contextmanager
def _recording_inputs(task: Task) -> Iterator[dict[int, list[Any]]]:
    """Records how losses call the subclassed models of a task, whose inputs Keras does not know.

    Yields, by the id of a model, the specs of the arguments of its first call, as
    `keras.Model.export` takes them: any number of rows, and no half precision.
    """
    found: dict[int, list[Any]] = {}
    every = [layer for layer in layers_of(task) if isinstance(layer, keras.Model)]
    models = [model for model in every if not getattr(model, "inputs", None)]
    replaced = [vars(model).get("call") for model in models]  # such as by Trainer.remat
    for model in models:
        model.call = functools.partial(_recorded, found, id(model), model.call)
    try:
        yield found
    finally:
        for model, earlier in zip(models, replaced, strict=True):
            if earlier is None:
                del model.call
            else:
                model.call = earlier


def _recorded(
    found: dict[int, list[Any]], key: int, call: Callable[..., Any], *given: Any, **more: Any
) -> Any:
    arguments = inspect.signature(call).bind(*given, **more).arguments
    inputs = [
        x
        for name, x in arguments.items()
        if name != "mask" and all(map(tf.is_tensor, tf.nest.flatten(x)))
    ]
    found.setdefault(key, tf.nest.map_structure(_spec, inputs))
    return call(*given, **more)


def _spec(value: Any) -> tf.TensorSpec:
    """Returns the spec of an input; Keras has cast it to the model's dtype, such as float16."""
    dtype = tf.as_dtype(value.dtype)
    half = dtype.is_floating and dtype.size == 2
    return tf.TensorSpec([None, *value.shape[1:]], tf.float32 if half else dtype)
