"""The figures and changes of a task's step, known before the slots and the sums are laid out.

A task's step is rehearsed: traced once with gradients and sums of unknown values, which computes
little and runs nothing. The rehearsal gives what must be known before the update itself is traced:
the losses, whose metric sums the loop carries, and the variables of each optimizer, whose slots it
writes. Each loss is probed (`ddl.training.probes`) when the step first uses it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.data.batch import Batch
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.optimizers.groups import Optimizers, assign, groups_by_name
from ddl.random import batch_counter
from ddl.step import effects
from ddl.step.clipping import Variables
from ddl.step.engine import BUILT_IN, Applied, Groups, LossOf, StepPlan
from ddl.step.global_gradient import Reduced
from ddl.step.gradients import trainable_variables
from ddl.step.loss import Loss
from ddl.step.state import TrainingState
from ddl.step.update import Update
from ddl.tasks.parts import each_once, layers_of, own_variables_of
from ddl.tasks.task import Task, has_step


def plan_of(
    task: Task,
    optimizer: Optimizers,
    loss_of: LossOf,
    strategy: tf.distribute.Strategy,
    pipelines: Mapping[str, BatchPipeline],
) -> StepPlan:
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
    groups, name = groups_by_name(optimizer), type(task).__name__
    plan, of_task = StepPlan(groups, loss_of), list[tf.Variable]()
    has_groups = any(len(of_name) > 1 for of_name in groups.values())
    if traits_of(strategy).asynchronous and (has_step(task) or has_groups):
        what = f"{name}.step" if has_step(task) else "ParameterGroups"
        raise ConfigError(
            f"--strategy=parameter_server cannot run {what}: its workers make the updates of one "
            "optimizer, each from a batch of its own. Use another strategy."
        )
    if not has_step(task) and (list(pipelines) != [""] or len(groups) > 1):
        raise ConfigError(
            f"{name} has no `step`, which several sources in Trainer.train_data and several "
            f"optimizers need, got {', '.join([*filter(None, pipelines), *groups])}. Pass one of "
            "each (ParameterGroups is one), or give the task a method step(update, batch)."
        )
    with _recording_inputs(task) as plan.inputs:
        if has_step(task):
            calls = _rehearsed(task, plan, strategy, pipelines)
            of_task = own_variables_of(task, layers_of(task))  # built by now
        else:
            plan.losses[BUILT_IN] = loss_of(task.per_example, "")
            calls = [(one, trainable_variables(task.model), False) for one in groups]
    plan.applied = _applied(groups, calls)
    for variable in [*(v.value for v in plan.trained), *of_task]:
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
    plan: StepPlan,
    strategy: tf.distribute.Strategy,
    pipelines: Mapping[str, BatchPipeline],
) -> list[tuple[str, Variables, bool]]:
    """Rehearses and checks the task's step; returns what it applies (`Update.apply_calls`)."""
    updates, where = list[Update](), f"{type(task).__name__}.step"

    def trace(state: TrainingState) -> None:
        batches = dict.fromkeys(pipelines, Batch({}, {}, batch_counter(state.batches)))
        engine: Any = _Nothing(plan, strategy, pipelines)
        updates.append(Update(task, engine, state, batches))
        updates[-1].run()

    def traced() -> tf.Graph:
        state = TrainingState.initial(1.0, tf.zeros([0], tf.float64))
        with strategy.scope(), microbatch.without_traces_of_the_user():
            return tf.function(trace, autograph=False).get_concrete_function(state).graph

    before, graph = effects.states_of_generators(task), traced()
    if effects.states_of_generators(task) != before:
        effects.check_python_draws(where, task, traced)
    effects.check_stateless(where, graph)
    optimizers = [x.optimizer for of_name in plan.groups.values() for x in of_name.values()]
    effects.check_writes(where, graph, task, optimizers, strategy)
    _check_complete(where, task, updates[-1], plan.groups)
    plan.batches, plan.calls = updates[-1].taken, updates[-1].calls
    return list(updates[-1].apply_calls)


@dataclasses.dataclass
class _Nothing:
    """Stands for an `Engine` and its `GlobalGradient` in a rehearsal: computes nothing."""

    plan: StepPlan
    strategy: tf.distribute.Strategy
    pipelines: Mapping[str, BatchPipeline]

    @property
    def gradient(self) -> "_Nothing":
        return self

    def __call__(self, loss: Loss, variables: Variables, *_: Any, **options: Any) -> Reduced:
        values = [tf.zeros(v.shape, v.dtype) for v in variables]
        if loss.each is not None:
            loss.each(values)  # for the checks of the graph
        return Reduced(values, None, None, loss.form.metrics.zeros())

    def sums(self, loss: Loss, *_: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.zeros([loss.form.entries], tf.float64), tf.ones([], tf.float64)

    def finite(self, values: Sequence[Any]) -> None:
        return None

    def apply(self, *_: Any) -> tf.Tensor:
        return tf.zeros([], tf.float64)


def _check_complete(where: str, task: Any, update: Update, groups: Groups) -> None:
    """Raises ConfigError for what the step leaves out, or what no attribute leads to."""
    if not update.apply_calls:
        raise ConfigError(f"{where} applies no gradients: call update.apply or update.minimize.")
    if unused := groups.keys() - {optimizer for optimizer, _, _ in update.apply_calls}:
        raise ConfigError(f"{where} never uses the optimizer {min(unused)!r}: apply by it.")
    if idle := update.taken.keys() - {source for _, source in update.functions.values()}:
        raise ConfigError(f"{where} never uses the source {min(idle)!r}: pass its batch.")
    changed = {id(v.value): v.path for _, variables, _ in update.apply_calls for v in variables}
    changed |= {id(v): v.name for v in update.averaged}
    layers = layers_of(task)
    held = [v.value for layer in layers for v in layer.variables]
    known = set(map(id, [*held, *own_variables_of(task, layers)]))
    if unknown := [path for key, path in changed.items() if key not in known]:
        raise ConfigError(
            f"{where} changes the variables {', '.join(unknown)}, but no attribute of the task "
            "leads to them, so no checkpoint would hold them. Keep their layers in attributes."
        )
    trainable = (v for layer in layers for v in layer.trainable_variables)
    if forgotten := dict.fromkeys(v.path for v in trainable if id(v.value) not in changed):
        raise ConfigError(
            f"{where} changes no variable of {', '.join(forgotten)}, although they are trainable. "
            "Pass them to update.minimize, or set trainable = False on their layers."
        )


def _applied(groups: Groups, calls: Sequence[tuple[str, Variables, bool]]) -> dict[str, Applied]:
    """Returns what each group's optimizer updates, for the calls of `Update.apply_calls`."""
    found = {}
    for name, of_name in groups.items():
        by_name = [(variables, in_branch) for of, variables, in_branch in calls if of == name]
        every = each_once(v for variables, _ in by_name for v in variables)
        for group, updated in assign(of_name, every).items():
            ids = set(map(id, updated))
            varies = [in_branch for given, in_branch in by_name if ids & set(map(id, given))]
            times = None if any(varies) else len(varies)
            found[group] = Applied(of_name[group].optimizer, updated, times)
    return found


def may_depend_on(
    task: Task, plan: StepPlan, layers: Sequence[keras.layers.Layer]
) -> list[keras.Variable]:
    """Returns the variables on which a loss may depend besides those of its gradient.

    These are the frozen ones, or with a task's step all of its layers and optimizers.
    """
    if has_step(task):
        return [*plan.trained, *(v for layer in layers for v in layer.variables)]
    every = [(layer, v) for layer in layers for v in layer._trainable_variables]
    trained = {id(v) for layer, v in every if layer.trainable and v.trainable}
    return [v for _, v in every if id(v) not in trained]


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
