"""The pieces of a Trainer that are built from its data, its task and the kit of `ddl.step`."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.choices import BatchMoments, JitCompile
from ddl.data.conversion import as_source, sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.communication import Communication
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.layers.normalization import take_over_moments
from ddl.optimizers.fused import updates_rows
from ddl.optimizers.groups import Optimizers, by_name, groups_by_name
from ddl.precision import LossScale
from ddl.random import hashed
from ddl.step import gradients as gradient_path
from ddl.step.all_reduce import AllReduce
from ddl.step.compiled import Compiler
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import Limit
from ddl.step.loss import Loss
from ddl.step.moving_statistics import Statistics, allow_replica_writes
from ddl.step.planning import Plan, plan_built_in, plan_own
from ddl.step.probes import Probes
from ddl.step.remat import Remat, recomputed
from ddl.step.sharding import sharding_of
from ddl.step.train_step import TrainStep
from ddl.step.weight_average import ExponentialMovingAverage, WeightAverages
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, Task, evaluation_loss, has_step
from ddl.training.checks import check_created_in_scope, computes_in_float16, sizes_by_source

_MUCH_DATA = 1 << 26  # bytes


class Pipelines:
    """Makes the pipelines of a trainer's data; each argument means what it means to `ddl.Trainer`.

    Attributes:
      train: Pipeline of each source of training data, by its name; "" if there is only one.
      first: Pipeline of the first source, which counts the epochs.
    """

    def __init__(
        self,
        task: Task,
        train_data: Any,
        global_batch_size: int | Mapping[str, int],
        accumulation_steps: int,
        seed: int,
        shuffle: bool,
        data_on_device: bool | Literal["auto"],
    ):
        """Checks the training data by the task's `check`; reads none."""
        self._task, self._seed, self._resident = task, seed, data_on_device
        sources = sources_by_name(train_data)
        sizes = sizes_by_source(global_batch_size, list(sources))
        self.train: dict[str, BatchPipeline] = {}
        for name, source in sources.items():
            # Sources of one length would otherwise have one order.
            order = {"shuffle": shuffle, "order_seed": hashed(seed, name) if name else seed}
            size, microbatches = sizes[name], accumulation_steps
            self.train[name] = self._made(
                source, size, not name, microbatches=microbatches, **order
            )
        self.first = next(iter(self.train.values()))
        arrays = [getattr(one.source, "arrays", None) or {} for one in self.train.values()]
        if sum(array.nbytes for each in arrays for array in each.values()) > _MUCH_DATA:
            gc.collect()  # a Trainer that a notebook replaces refers to itself

    def in_order(self, data: Any, *, may_reside: bool, is_checked: bool = True) -> BatchPipeline:
        """Returns the pipeline of other data, in their order.

        Args:
          data: As `train_data`.
          may_reside: Whether arrays may be kept on the devices.
          is_checked: Whether the task's `check` is called.
        """
        resident = self._resident if may_reside else False
        size = self.first.global_batch_size
        return self._made(data, size, is_checked, shuffle=False, resident=resident)

    def _made(self, data: Any, size: int, is_checked: bool, **arguments: Any) -> BatchPipeline:
        source = as_source(data, "Trainer.eval_data")
        if is_checked and (check := getattr(self._task, "check", None)) is not None:
            check(source)
        given = {"seed": self._seed, "resident": self._resident, **arguments}
        return BatchPipeline(source, size, **given)


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
    accumulation_steps: int,
) -> Plan:
    """Returns the plan of the task's own step, or of the built-in one; builds the models.

    Args:
      task: As `ddl.Trainer` takes it.
      optimizer: As `ddl.Trainer` takes it.
      probes: The probes of the task.
      strategy: The strategy.
      train: Pipeline of each source of training data; learns how many batches an update reads.
      accumulation_steps: Microbatches per replica and update.

    Raises:
      ConfigError: If the step cannot be made of these, or the model was made outside of the scope.
    """
    name, groups = type(task).__name__, groups_by_name(optimizer)
    every = {group: one for groups_of in groups.values() for group, one in groups_of.items()}
    is_plain = every.keys() == groups.keys() and not any(x.frozen_until for x in every.values())
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
    plan.check_microbatches(accumulation_steps)
    check_created_in_scope(plan.trained, strategy)
    return plan


def training_layers(task: Task, plan: Plan) -> list[keras.layers.Layer]:
    """Returns the layers of the task, without those that only compute as in an evaluation."""
    losses = (*plan.losses.values(), *plan.means.values())
    in_training = {id(layer) for one in losses for layer in one.training.layers}
    return [layer for layer in layers_of(task) if id(layer) in in_training]


def build_update(
    task: Task,
    optimizer: Optimizers,
    plan: Plan,
    train: Mapping[str, BatchPipeline],
    strategy: tf.distribute.Strategy,
    clip_norm: Limit,
    weight_average: ExponentialMovingAverage | None,
    loss_scale: LossScale | Literal["auto"] | None,
    batch_moments: BatchMoments,
    communication: Communication | None,
    jit_compile: JitCompile,
    remat: Remat | None,
    shard_optimizer_state: bool,
) -> TrainStep:
    """Builds the optimizers' slots, the averages and the update.

    `plan` is that of the step, `train` the pipeline of each source of training data by its name;
    each other argument means what it means to `ddl.Trainer`.
    """
    layers, optimizers = layers_of(task), by_name(optimizer)
    take_over_moments(layers)
    allow_replica_writes(layers, strategy)
    statistics = Statistics(layers, strategy)
    normalizing = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    all_reduce = AllReduce(strategy, communication or Communication())
    variables = {name: one.variables for name, one in plan.applied.items()}
    sharding = sharding_of(optimizers, variables, all_reduce, strategy, shard_optimizer_state)
    if loss_scale == "auto":
        in_float16 = computes_in_float16(layers if has_step(task) else [task.model])
        loss_scale = LossScale() if in_float16 else None
    if loss_scale is not None and traits_of(strategy).asynchronous:
        raise ConfigError(
            "--strategy=parameter_server cannot scale the loss, which float16 needs. Set PRECISION "
            "to 'mixed_bfloat16' or 'float32'."
        )
    trained = [v.value for v in plan.trained]
    averages = None
    if weight_average is not None:
        averages = WeightAverages(weight_average, [*trained, *statistics.floating], strategy)
    gradient = GlobalGradient(
        strategy=strategy,
        compiler=Compiler(jit_compile, strategy, "training"),
        pipelines=train,
        all_reduce=all_reduce,
        scales=loss_scale is not None,
        moved_alone=Statistics(normalizing, strategy) if batch_moments == "per_replica" else None,
        complete=[*plan.trained, *(v for layer in layers for v in layer.variables)]
        if has_step(task)
        else _frozen_variables(layers),
        remat=recomputed(remat, task, strategy) if remat else None,
        by_rows={id(v) for n, own in variables.items() if updates_rows(optimizers[n]) for v in own},
        sharding=sharding,
    )
    return TrainStep(
        task=task,
        plan=plan,
        gradient=gradient,
        optimizers=optimizers,
        moving=statistics,
        averages=averages,
        clips=gradient_path.clips_by_name(clip_norm, list(plan.groups)),
        loss_scale=loss_scale,
    )


def _frozen_variables(layers: Sequence[keras.layers.Layer]) -> list[keras.Variable]:
    """Returns the trainable variables that are frozen in all of the given layers."""
    own = [(layer, v) for layer in layers for v in layer._trainable_variables]
    trained = {id(v) for layer, v in own if layer.trainable and v.trainable}
    return [v for _, v in own if id(v) not in trained]
