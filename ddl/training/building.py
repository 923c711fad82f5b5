"""The pieces of a Trainer that depend on its data and its task."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.data.checks import check_same_classes, check_same_features
from ddl.data.conversion import as_source
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, message_of
from ddl.optimizers.groups import Optimizers, groups_by_name
from ddl.precision import LossScale
from ddl.step.loss import Loss
from ddl.step.planning import Plan, plan_of
from ddl.step.probes import Probes
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, Task, evaluation_loss, has_step

_MIXED_DTYPES = re.compile(r"has type \w+ that does not match type|have types \[")
"""Errors of TensorFlow for an operation whose inputs have several dtypes."""


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
    probes: Probes, pipeline: BatchPipeline, function: LossFunction | None = None
) -> Loss:
    """Returns a loss after its probes.

    Args:
      probes: The probes of the task.
      pipeline: The examples.
      function: A loss in training; None takes the loss of an evaluation.

    Raises:
      ConfigError: If the task cannot be evaluated, or the probes find a fault, such as an
        operation of several dtypes.
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
    try:
        loss.form = probes.form(loss, pipeline, training)
    except TypeError as error:
        if not _MIXED_DTYPES.search(text := message_of(error)):
            raise
        kinds = sorted({layer.compute_dtype for layer in layers_of(task)})
        spec = sorted(pipeline.element_spec.items())
        given = ", ".join(f"{name!r} {one.dtype.name}" for name, one in spec if name != "weight")
        raise ConfigError(
            f"{loss.where} mixes dtypes (layers compute in {', '.join(kinds)}; the features are "
            f"{given}): {text} Convert outputs with tf.cast(…, 'float32'), or the data with "
            ".astype('float32'); with PRECISION = 'float64', layers compute in float64."
        ) from error
    return loss


@contextmanager
def recording_inputs(task: Task) -> Iterator[dict[int, list[Any]]]:
    """Records how the losses traced in the `with` block call models whose inputs Keras ignores.

    Args:
      task: The task; looked at are its subclassed models, also within others.

    Yields:
      By the id of a model, the specs of the arguments of its first call, in their order, as
      `keras.Model.export` takes them: any number of rows, and no half precision.
    """
    found: dict[int, list[Any]] = {}
    every = [layer for layer in layers_of(task) if isinstance(layer, keras.Model)]
    models = [model for model in every if not getattr(model, "inputs", None)]
    for model in models:
        model.call = functools.partial(_recorded, found, id(model), model.call)
    try:
        yield found
    finally:
        for model in models:
            del model.call


def _recorded(
    found: dict[int, list[Any]], key: int, call: Callable[..., Any], *given: Any, **more: Any
) -> Any:
    arguments = inspect.signature(call).bind(*given, **more).arguments
    inputs = [x for name, x in arguments.items() if name not in ("training", "mask")]
    found.setdefault(key, tf.nest.map_structure(_spec, inputs))
    return call(*given, **more)


def _spec(value: Any) -> tf.TensorSpec:
    """Returns the spec of an input; Keras has cast it to the model's dtype, such as float16."""
    dtype = tf.as_dtype(value.dtype)
    half = dtype.is_floating and dtype.size == 2
    return tf.TensorSpec([None, *value.shape[1:]], tf.float32 if half else dtype)


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
