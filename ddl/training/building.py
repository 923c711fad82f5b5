"""The pieces of a Trainer that are built from its data and its task."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.data.checks import check_same_classes, check_same_features
from ddl.data.conversion import as_source, sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.optimizers.groups import Optimizers, groups_by_name
from ddl.precision import LossScale
from ddl.random import hashed
from ddl.step.loss import Loss
from ddl.step.planning import Plan, plan_built_in, plan_own
from ddl.step.probes import Probes
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, Task, evaluation_loss, has_step
from ddl.training.checks import check_created_in_scope, sizes_by_source


def training_pipelines(
    task: Task, data: Any, global_batch_size: int | Mapping[str, int], seed: int, **arguments: Any
) -> dict[str, BatchPipeline]:
    """Returns the pipeline of each source of training data, by its name; reads no data.

    Args:
      task: The task, whose `check` a single source must pass.
      data: As `ddl.Trainer` takes it.
      global_batch_size: As `ddl.Trainer` takes it.
      seed: As `ddl.Trainer` takes it.
      **arguments: `shuffle`, `resident` and `microbatches` of `BatchPipeline`.
    """
    sources = sources_by_name(data)
    sizes = sizes_by_source(global_batch_size, list(sources))
    if "" in sources and hasattr(task, "check"):
        task.check(sources[""])
    # Sources of one length would otherwise have one order.
    orders = {name: hashed(seed, name) if name else seed for name in sources}
    return {
        name: BatchPipeline(source, sizes[name], seed=seed, order_seed=orders[name], **arguments)
        for name, source in sources.items()
    }


def in_order(data: Any, train: Mapping[str, BatchPipeline], resident: Any = False) -> BatchPipeline:
    """Returns the pipeline of other data, in their order, with batches of the first source's size.

    Args:
      data: As `as_source` takes it.
      train: The pipelines of the training data.
      resident: As `BatchPipeline` takes it.
    """
    first = next(iter(train.values()))
    size, source = first.global_batch_size, as_source(data)
    return BatchPipeline(source, size, seed=first.seed, shuffle=False, resident=resident)


def evaluation_pipeline(
    task: Task, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of evaluation data, which have the form of the training data.

    Args:
      task: The task, whose `check` the data must pass.
      data: As `ddl.Trainer` takes it.
      argument: Name of the argument that the data are, for errors.
      train: The pipelines of the training data.
      resident: As `BatchPipeline` takes it.

    Raises:
      DataError: If the data are of another kind, or do not fit.
    """
    name = getattr(task, "input_name", None)
    if isinstance(data, tuple) and len(data) in (2, 3) and isinstance(name, str):
        x, *others = data  # x has the name of the input in the training data
        data = (x if isinstance(x, Mapping) else {name: x}, *others)
    pipeline = in_order(as_source(data, argument), train, resident)
    if hasattr(task, "check"):
        task.check(pipeline.source)
    if "" in train:
        check_same_features(train[""].element_spec, pipeline.element_spec)
        check_same_classes(train[""].source, pipeline.source)
    return pipeline


def probed_loss(
    probes: Probes,
    task: Task,
    strategy: tf.distribute.Strategy,
    pipeline: BatchPipeline,
    function: LossFunction | None = None,
    source: str = "",
) -> Loss:
    """Returns a loss after its probes.

    Args:
      probes: The probes of the task.
      task: The task.
      strategy: The strategy.
      pipeline: The examples.
      function: A loss in training; None takes the loss of an evaluation.
      source: Name of the source.

    Raises:
      ConfigError: If the task cannot be evaluated, or the probes find a fault.
    """
    training = function is not None
    function = function or getattr(task, "per_example", None) or evaluation_loss(task)
    if function is None:
        raise ConfigError(
            f"{type(task).__name__} cannot be evaluated. Give it a method evaluate(features) that "
            "returns a ddl.PerExample, or leave out eval_data."
        )
    data = [pipeline]  # without which the loss would keep the data of an evaluation alive
    form = lambda loss, training: probes.form(loss, data[0], training)  # noqa: E731
    replicas = strategy.num_replicas_in_sync
    loss = Loss(task, function, source, pipeline.global_batch_size, form, replicas)
    loss.form(training)
    if not training:
        data.clear()
    return loss


def planned(
    task: Task,
    optimizer: Optimizers,
    probes: Probes,
    strategy: tf.distribute.Strategy,
    train: Mapping[str, BatchPipeline],
) -> Plan:
    """Returns the plan of the task's own step, or of the built-in one; builds the models.

    Args:
      task: As `ddl.Trainer` takes it.
      optimizer: As `ddl.Trainer` takes it.
      probes: The probes of the task.
      strategy: The strategy.
      train: Pipeline of each source of training data; learns how many batches an update reads.

    Raises:
      ConfigError: If the step cannot be made of these, or the model was made outside of the scope.
    """
    name, groups = type(task).__name__, groups_by_name(optimizer)
    every = [group for of_name in groups.values() for group in of_name.values()]
    is_plain = len(every) == len(groups) and not any(group.frozen_until for group in every)
    if traits_of(strategy).asynchronous and (has_step(task) or not is_plain):
        what = f"{name}.step" if has_step(task) else "ParameterGroups"
        raise ConfigError(
            f"--strategy=parameter_server cannot run {what}: its workers make the updates of one "
            "optimizer, each from a batch of its own. Use another strategy."
        )
    if not has_step(task) and list(train) != [""]:
        raise ConfigError(
            f"{name} has no `step`, which several sources in Trainer.train_data need, got "
            f"{', '.join(train)}. Pass one, or give the task a method step(update, batch)."
        )

    def loss_of(function: LossFunction, source: str) -> Loss:
        return probed_loss(probes, task, strategy, train[source], function, source)

    with Workers(strategy).failing_together():
        if has_step(task):
            plan = plan_own(task, groups, loss_of, strategy, train)
        else:
            plan = plan_built_in(task, groups, loss_of)
    for source, pipeline in train.items():
        pipeline.batches_per_update = plan.batches[source]
    plan.check_microbatches(next(iter(train.values())).microbatches)
    check_created_in_scope(plan.trained, strategy)
    return plan


def normalizing_layers(plan: Plan) -> list[keras.layers.BatchNormalization]:
    """Returns the layers that take moments of a microbatch in training."""
    losses = (*plan.losses.values(), *plan.means.values())
    every = {id(layer): layer for one in losses for layer in one.training.layers}
    return [x for x in every.values() if isinstance(x, keras.layers.BatchNormalization)]


def known_loss_scale(
    given: LossScale | Literal["auto"] | None, task: Task, strategy: tf.distribute.Strategy
) -> LossScale | None:
    """Returns the loss scale; "auto" scales if a layer computes in float16.

    Raises:
      ConfigError: If an asynchronous strategy would have to scale the loss.
    """
    if given == "auto":
        layers = layers_of(task) if has_step(task) else task.model._flatten_layers()
        # Such a gradient may underflow.
        given = LossScale() if any(x.compute_dtype == "float16" for x in layers) else None
    if given is not None and traits_of(strategy).asynchronous:
        raise ConfigError(
            "--strategy=parameter_server cannot scale the loss, which float16 needs. Set PRECISION "
            "to 'mixed_bfloat16' or 'float32'."
        )
    return given


def not_updated(
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
