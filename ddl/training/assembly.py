"""The parts of a trainer, built and checked in the order in which they need each other."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.data.checks import check_same_classes, check_same_features
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
from ddl.seeds import hashed
from ddl.step import gradients as gradient_path
from ddl.step.all_reduce import AllReduce
from ddl.step.compiled import Compiler
from ddl.step.global_gradient import GlobalGradient
from ddl.step.loss import Loss
from ddl.step.moving_statistics import Statistics, allow_replica_writes
from ddl.step.planning import Plan, plan_built_in, plan_own
from ddl.step.probes import Probes
from ddl.step.remat import recomputed
from ddl.step.sharding import sharding_of, variables_of
from ddl.step.train_step import TrainStep
from ddl.step.weight_average import WeightAverages
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, Task, evaluation_loss, has_step
from ddl.training.asynchronous.loop import CoordinatedEvaluation
from ddl.training.checks.arguments import Options
from ddl.training.checks.batch_size import sizes_by_source
from ddl.training.checks.fixed_settings import TrainedVariables
from ddl.training.checks.model import (
    check_computes_by_row,
    check_created_in_scope,
    computes_in_float16,
    frozen_variables,
    warn_of_batch_moments,
    warn_of_tf32,
)
from ddl.training.checks.same_data import check_same_data
from ddl.training.divergence import VariablesFinite
from ddl.training.evaluation import Evaluation
from ddl.training.evaluation_weights import EvaluationWeights
from ddl.training.results.corpus_figures import CorpusFigures
from ddl.training.results.other_data import OtherData


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of a trainer.

    Attributes:
      workers: The workers of the strategy.
      train: Pipeline of each source of training data, by its name; "" if there is only one.
      eval_pipeline: Pipeline of the evaluation data, if any.
      evaluation: The evaluation; None without evaluation data.
      eval_metric_names: Names of the figures of an evaluation; empty if the task has none.
      training_layers: Layers of the task, without those that only compute as in an evaluation.
      update: The update, with the averages and the statistics.
      evaluation_weights: The weights for evaluation.
      given: Evaluations and predictions on data that a call gives.
      corpus: The figures of all outputs of an evaluation.
      finite: Check of all variables that an update may change.
      trained: The choice of trained variables, which must not change.
    """

    workers: Workers
    train: Mapping[str, BatchPipeline]
    eval_pipeline: BatchPipeline | None
    evaluation: Evaluation | CoordinatedEvaluation | None
    eval_metric_names: Sequence[str]
    training_layers: Sequence[keras.layers.Layer]
    update: TrainStep
    evaluation_weights: EvaluationWeights
    given: OtherData
    corpus: CorpusFigures
    finite: VariablesFinite
    trained: TrainedVariables

    @property
    def first(self) -> BatchPipeline:
        """Pipeline of the first source of training data, which counts the epochs."""
        return next(iter(self.train.values()))


def assemble(
    task: Task,
    optimizer: Optimizers,
    train_data: Any,
    eval_data: Any,
    strategy: tf.distribute.Strategy,
    options: Options,
) -> Assembly:
    """Builds the parts of a trainer, with the model and the optimizer's slots.

    Args:
      task: As `ddl.Trainer` takes it, like all that follow.
      optimizer: See `ddl.Trainer`.
      train_data: See `ddl.Trainer`.
      eval_data: See `ddl.Trainer`.
      strategy: The strategy.
      options: The other arguments.

    Raises:
      ConfigError: See `ddl.Trainer`, as for DataError.
    """
    check_computes_by_row(layers_of(task))
    train = _training_pipelines(task, train_data, options)
    first = next(iter(train.values()))
    eval_pipeline = None
    if eval_data is not None:  # before the probes run the task, which may miss a feature
        eval_pipeline = _pipeline(task, eval_data, first.global_batch_size, options)
        if train.keys() == {""}:
            check_same_features(first.element_spec, eval_pipeline.element_spec)
            check_same_classes(first.source, eval_pipeline.source)
    check_same_data(strategy, train, eval_pipeline)

    optimizers = by_name(optimizer)
    probes = Probes(task, strategy, list(optimizers.values()))

    def loss_on(function: LossFunction, source: str, pipeline: BatchPipeline) -> Loss:
        replicas = strategy.num_replicas_in_sync
        form = lambda loss, training: probes.form(loss, pipeline, training)  # noqa: E731
        return Loss(task, function, source, pipeline.global_batch_size, form, replicas)

    def trained_loss(function: LossFunction, source: str) -> Loss:
        loss = loss_on(function, source, train[source])
        loss.form(training=True)
        return loss

    with (workers := Workers(strategy)).failing_together():
        plan = _plan(task, optimizer, trained_loss, strategy, train)  # builds the models
    for name, pipeline in train.items():
        pipeline.batches_per_update = plan.batches[name]

    def evaluated_loss(pipeline: BatchPipeline) -> Loss:
        if hasattr(task, "per_example"):
            return loss_on(task.per_example, "", pipeline)
        if (function := evaluation_loss(task)) is None:
            raise ConfigError(
                f"{type(task).__name__} cannot be evaluated: it has neither `per_example` nor "
                "`evaluate`. Give it a method evaluate(features) that returns a ddl.PerExample, or "
                "leave out the evaluation data."
            )
        return loss_on(function, "", pipeline)

    of_one = train.keys() == {""}
    evaluation: Evaluation | CoordinatedEvaluation | None = None
    eval_names: Sequence[str] = ()
    if eval_pipeline is not None:
        evaluated = evaluated_loss(eval_pipeline)
        with workers.failing_together():
            eval_names = evaluated.form(training=False).metrics.names
        if traits_of(strategy).asynchronous:
            evaluation = CoordinatedEvaluation(evaluated, eval_pipeline, strategy)
        else:
            xla = Compiler(options.jit_compile, strategy, "evaluation")
            evaluation = Evaluation(evaluated, eval_pipeline, strategy, xla)
    plan.check_microbatches(options.accumulation_steps)
    check_created_in_scope(plan.trained, strategy)
    layers = layers_of(task)
    losses = (*plan.losses.values(), *plan.means.values())
    in_training = {id(x) for one in losses for x in one.training.layers}
    training_layers = [layer for layer in layers if id(layer) in in_training]
    warn_of_batch_moments(
        training_layers, strategy, options.accumulation_steps, options.batch_moments
    )
    warn_of_tf32(strategy)
    take_over_moments(layers)
    update = _update(task, optimizers, plan, train, strategy, options, layers)

    given = OtherData(
        task,
        strategy,
        lambda task, source, may_reside: _pipeline(
            task,
            source,
            first.global_batch_size,
            options if may_reside else dataclasses.replace(options, data_on_device=False),
        ),
        evaluated_loss,
        lambda: Compiler(options.jit_compile, strategy, "evaluation"),
        first.element_spec if of_one else None,
        first.source if of_one else None,
    )
    corpus = CorpusFigures(options.corpus_metrics, given, workers)
    models = layers if has_step(task) else [task.model]
    of_models = list({id(v): v for model in models for v in model.variables}.values())
    kept_finite = [
        *(v.value for v in of_models),
        *(v for one in optimizers.values() for v in variables_of(one, update.sharding)),
        *(update.averages.variables if update.averages else ()),
    ]
    return Assembly(
        workers,
        train,
        eval_pipeline,
        evaluation,
        corpus.names_in(eval_pipeline, eval_names),
        training_layers,
        update,
        EvaluationWeights(update.averages),
        given,
        corpus,
        VariablesFinite(kept_finite, workers),
        TrainedVariables(task, layers),
    )


def _plan(
    task: Task,
    optimizer: Optimizers,
    loss_of: Callable[[LossFunction, str], Loss],
    strategy: tf.distribute.Strategy,
    train: Mapping[str, BatchPipeline],
) -> Plan:
    """Returns the plan of the task's own step, or of the built-in one; builds the models."""
    name, groups = type(task).__name__, groups_by_name(optimizer)
    asynchronous = traits_of(strategy).asynchronous
    if has_step(task):
        if asynchronous:
            raise ConfigError(
                f"{name} has a step of its own, which --strategy=parameter_server cannot run: its "
                "workers update independently, without a global batch. Use another strategy."
            )
        return plan_own(task, groups, loss_of, strategy, train)
    if list(train) != [""]:
        raise ConfigError(
            f"{name} has no `step`, which several sources in Trainer.train_data need, got "
            f"{', '.join(train)}. Pass one source, or give the task a method step(update, batch)."
        )
    plan = plan_built_in(task, groups, loss_of)
    grouped = list(plan.applied) != list(groups) or any(map(plan.frozen_until, plan.applied))
    if grouped and asynchronous:
        raise ConfigError(
            "--strategy=parameter_server cannot run ParameterGroups: its workers count the "
            "updates of one optimizer. Pass one optimizer, or use another strategy."
        )
    return plan


def _training_pipelines(task: Task, data: Any, options: Options) -> dict[str, BatchPipeline]:
    """Returns the pipeline of each source of training data, by its name."""
    sources = sources_by_name(data)
    sizes = sizes_by_source(options.global_batch_size, list(sources))
    return {
        name: _pipeline(
            task if name == "" else None,
            source,
            sizes[name],
            options,
            shuffle=options.shuffle,
            microbatches=options.accumulation_steps,
            # Sources of one length would otherwise have one order.
            order_seed=hashed(options.seed, name) if name else options.seed,
        )
        for name, source in sources.items()
    }


def _pipeline(
    task: Task | None, data: Any, global_batch_size: int, options: Options, **others: Any
) -> BatchPipeline:
    """Returns a pipeline, of data that the task has checked."""
    source = as_source(data, "Trainer.eval_data")
    if (check := getattr(task, "check", None)) is not None:
        check(source)
    return BatchPipeline(
        source,
        global_batch_size,
        seed=options.seed,
        resident=options.data_on_device,
        **{"shuffle": False, **others},
    )


def _update(
    task: Task,
    optimizers: Mapping[str, keras.optimizers.Optimizer],
    plan: Plan,
    train: Mapping[str, BatchPipeline],
    strategy: tf.distribute.Strategy,
    options: Options,
    layers: Sequence[keras.layers.Layer],
) -> TrainStep:
    """Builds the optimizers' slots, the averages and the update."""
    allow_replica_writes(layers, strategy)
    statistics = Statistics(layers, strategy)
    per_replica = options.batch_moments == "per_replica"
    normalizing = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    communication = options.communication or Communication()
    all_reduce = AllReduce(strategy, communication)
    variables = {name: one.variables for name, one in plan.applied.items()}
    sharding = sharding_of(
        optimizers, variables, all_reduce, strategy, options.shard_optimizer_state
    )
    if (loss_scale := options.loss_scale) == "auto":
        in_float16 = computes_in_float16(layers if has_step(task) else [task.model])
        loss_scale = LossScale() if in_float16 else None
    trained = [v.value for v in plan.trained]
    averages = None
    if options.weight_average is not None:
        averages = WeightAverages(
            options.weight_average, [*trained, *statistics.floating], strategy
        )
    gradient = GlobalGradient(
        strategy=strategy,
        compiler=Compiler(options.jit_compile, strategy, "training"),
        pipelines=train,
        all_reduce=all_reduce,
        scales=loss_scale is not None,
        moved_alone=Statistics(normalizing, strategy) if per_replica else None,
        complete=[*plan.trained, *(v for layer in layers for v in layer.variables)]
        if has_step(task)
        else frozen_variables(layers),
        remat=recomputed(options.remat, task, strategy) if options.remat else None,
        by_rows={
            id(variable)
            for name, own in variables.items()
            if updates_rows(optimizers[name])
            for variable in own
        },
        sharding=sharding,
    )
    return TrainStep(
        task=task,
        plan=plan,
        gradient=gradient,
        optimizers=optimizers,
        moving=statistics,
        averages=averages,
        clips=gradient_path.clips_by_name(options.clip_norm, list(plan.groups)),
        loss_scale=loss_scale,
    )
