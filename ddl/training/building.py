"""The pieces of a Trainer that depend on its data and its task."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ddl.data.checks import check_same_classes, check_same_features
from ddl.data.conversion import as_source
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.optimizers.groups import Optimizers, groups_by_name
from ddl.precision import LossScale
from ddl.step.loss import Loss
from ddl.step.planning import Plan, plan_of
from ddl.tasks.task import LossFunction, Task, evaluation_loss, has_step
from ddl.training.probes import Probes


def in_order(
    task: Any, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of other data, in their order, with batches of the first source's size.

    Args:
      task: The task. Inputs alone, and x of (x, y), get the name of its input.
      data: As `ddl.Trainer` takes it, or one array of inputs.
      argument: Name of the argument that the data are, for errors.
      train: The pipelines of the training data.
      resident: As `BatchPipeline` takes it.

    Raises:
      DataError: If the data are of another kind.
    """
    name = getattr(task, "input_name", None)
    x, *others = data if isinstance(data, tuple) and len(data) in (2, 3) else [data]
    is_array = isinstance(x, np.ndarray) or tf.is_tensor(x)
    if isinstance(name, str) and (is_array or others) and not isinstance(x, Mapping):
        data = ({name: x}, *others) if others else {name: x}
    first, source = next(iter(train.values())), as_source(data, argument)
    size = first.global_batch_size
    return BatchPipeline(source, size, seed=first.seed, shuffle=False, resident=resident)


def evaluation_pipeline(
    task: Task, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of evaluation data, which have the form of the training data.

    Args:
      task: The task, whose `check` the data must pass.
      data: As `in_order` takes it, and the further arguments.
      argument: See there.
      train: See there.
      resident: See there.

    Raises:
      DataError: If the data are of another kind, or do not fit.
    """
    pipeline = in_order(task, data, argument, train, resident)
    if hasattr(task, "check"):
        task.check(pipeline.source)
    if "" in train:
        check_same_features(train[""].element_spec, pipeline.element_spec)
        check_same_classes(train[""].source, pipeline.source)
    return pipeline


def probed_loss(
    probes: Probes, pipeline: BatchPipeline, function: LossFunction | None = None
) -> Loss:
    """Returns a loss after its probes.

    Args:
      probes: The probes of the task.
      pipeline: The examples.
      function: A loss in training; None takes the loss of an evaluation.

    Raises:
      ConfigError: If the task cannot be evaluated, or the probes find a fault.
    """
    task, training = probes.task, function is not None
    function = function or getattr(task, "per_example", None) or evaluation_loss(task)
    if function is None:
        raise ConfigError(
            f"{type(task).__name__} cannot be evaluated. Give it a method evaluate(features) that "
            "returns a ddl.PerExample, or leave out eval_data."
        )
    replicas = probes.strategy.num_replicas_in_sync
    loss = Loss(task, function, pipeline.global_batch_size, replicas)
    loss.form = probes.form(loss, pipeline, training)
    return loss


def planned(optimizer: Optimizers, probes: Probes, train: Mapping[str, BatchPipeline]) -> Plan:
    """Returns the plan of the task's own step, or of the built-in one; builds the models.

    Args:
      optimizer: As `ddl.Trainer` takes it.
      probes: The probes of the task.
      train: Pipeline of each source of training data; learns how many batches an update reads.

    Raises:
      ConfigError: If the step cannot be made of these, or the model was made outside of the scope.
    """
    task, strategy, groups = probes.task, probes.strategy, groups_by_name(optimizer)
    name, own_step = type(task).__name__, has_step(task)
    has_groups = any(len(of_name) > 1 for of_name in groups.values())
    if traits_of(strategy).asynchronous and (own_step or has_groups):
        what = f"{name}.step" if own_step else "ParameterGroups"
        raise ConfigError(
            f"--strategy=parameter_server cannot run {what}: its workers make the updates of one "
            "optimizer, each from a batch of its own. Use another strategy."
        )
    if not own_step and list(train) != [""]:
        raise ConfigError(
            f"{name} has no `step`, which several sources in Trainer.train_data need, got "
            f"{', '.join(train)}. Pass one, or give the task a method step(update, batch)."
        )

    def loss_of(function: LossFunction, source: str) -> Loss:
        return probed_loss(probes, train[source], function)

    with Workers(strategy).failing_together():
        plan = plan_of(task, groups, loss_of, strategy, train)
    for source, pipeline in train.items():
        pipeline.batches_per_update = plan.batches[source]
    plan.check_microbatches(next(iter(train.values())).microbatches)
    return plan


def normalizing_layers(plan: Plan) -> list[keras.layers.BatchNormalization]:
    """Returns the layers that take moments of a microbatch in training."""
    losses = (*plan.losses.values(), *plan.means.values())
    every = {id(layer): layer for one in losses for layer in one.form.layers}
    return [x for x in every.values() if isinstance(x, keras.layers.BatchNormalization)]


def known_loss_scale(
    given: LossScale | Literal["auto"] | None,
    layers: Sequence[keras.layers.Layer],
    strategy: tf.distribute.Strategy,
) -> LossScale | None:
    """Returns the loss scale; "auto" scales if a layer computes in float16.

    Raises:
      ConfigError: If an asynchronous strategy would have to scale the loss.
    """
    if given == "auto":  # a gradient in float16 may underflow
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
