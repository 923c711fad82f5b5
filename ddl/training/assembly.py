"""The parts of a trainer, built and checked in the order in which they need each other."""

import dataclasses
from collections.abc import Mapping, Sequence
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
from ddl.step.compiled.compiler import Compiler
from ddl.step.global_gradient import GlobalGradient
from ddl.step.moving_statistics import Statistics, allow_replica_writes
from ddl.step.objective import Objective
from ddl.step.remat import Parts
from ddl.step.sharding import sharding_of, variables_of
from ddl.step.update import UpdateStep
from ddl.step.verbs.plan import StepPlan
from ddl.step.weight_average import WeightAverages
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction, Task, has_step
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
from ddl.training.checks.row_independence import RowIndependence
from ddl.training.checks.same_data import check_same_data
from ddl.training.divergence import VariablesFinite
from ddl.training.evaluation import Evaluation
from ddl.training.evaluation_weights import EvaluationWeights
from ddl.training.results.corpus_figures import CorpusFigures
from ddl.training.results.other_data import OtherData
from ddl.training.step_plan import evaluation_objective, not_evaluated, step_plan


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
      rows: Check that rows are independent of each other.
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
    rows: RowIndependence
    update: UpdateStep
    evaluation_weights: EvaluationWeights
    given: OtherData
    corpus: CorpusFigures
    finite: VariablesFinite
    trained: TrainedVariables

    @property
    def first(self) -> BatchPipeline:
        """Pipeline of the first source of training data, which counts the epochs."""
        return next(iter(self.train.values()))

    def check_for_training(self) -> None:
        """Raises ConfigError for other trained variables, or rows that depend on each other."""
        self.trained.check()
        of_one = list(self.train) == [""]
        modes = [True, False] if of_one and self.eval_pipeline is not None else [True]
        with self.workers.failing_together():
            for name, pipeline in self.train.items():
                self.rows.check(pipeline, modes, name)


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
    if eval_data is not None:  # before `Objective` runs the task, which may miss a feature
        eval_pipeline = _pipeline(task, eval_data, first.global_batch_size, options)
        if train.keys() == {""}:
            check_same_features(first.element_spec, eval_pipeline.element_spec)
            check_same_classes(first.source, eval_pipeline.source)
    check_same_data(strategy, train, eval_pipeline)

    def objective(loss: LossFunction | None, pipeline: BatchPipeline) -> Objective:
        form = pipeline.element_spec, pipeline.global_batch_size
        return Objective(task, *form, strategy, loss, optimizers.values())

    optimizers = by_name(optimizer)
    plan = step_plan(  # builds the models
        task,
        groups_by_name(optimizer),
        lambda loss, source: objective(loss, train[source]),
        strategy,
        train,
    )
    for name, pipeline in train.items():
        pipeline.batches_per_update = plan.batches[name]
    evaluated = None
    of_one = train.keys() == {""}
    if of_one or eval_pipeline is not None:  # several sources have no form in common
        pipeline = eval_pipeline or first
        evaluated = evaluation_objective(
            task, plan, lambda loss: objective(loss, pipeline), is_planned=of_one
        )
    evaluation: Evaluation | CoordinatedEvaluation | None = None
    if eval_pipeline is not None:
        if evaluated is None:
            raise ConfigError(not_evaluated(task))
        if traits_of(strategy).asynchronous:
            evaluation = CoordinatedEvaluation(evaluated, eval_pipeline, strategy)
        else:
            xla = Compiler(options.jit_compile, strategy, "evaluation")
            evaluation = Evaluation(evaluated, eval_pipeline, strategy, xla)
    plan.check_microbatches(options.accumulation_steps)
    check_created_in_scope(plan.trained, strategy)
    layers = layers_of(task)
    in_training = {id(x) for one in plan.objectives for x in one.training_layers}
    training_layers = [layer for layer in layers if id(layer) in in_training]
    warn_of_batch_moments(
        training_layers, strategy, options.accumulation_steps, options.batch_moments
    )
    warn_of_tf32(strategy)
    rows = RowIndependence(
        task,
        layers,
        strategy,
        lambda training, source: [
            (one.loss, one.placing[training])
            for one in (plan.objectives_of(source) if training else [evaluated])
            if one
        ],
    )
    take_over_moments(layers)
    update = _update(task, optimizers, plan, train, strategy, options, layers)

    def objective_on_given_data(pipeline: BatchPipeline) -> Objective:
        found = evaluation_objective(
            task, plan, lambda loss: objective(loss, pipeline), is_planned=False
        )
        if found is None:
            raise ConfigError(not_evaluated(task))
        return found

    given = OtherData(
        task,
        strategy,
        lambda task, source, may_reside: _pipeline(
            task,
            source,
            first.global_batch_size,
            options if may_reside else dataclasses.replace(options, data_on_device=False),
        ),
        objective_on_given_data,
        lambda: Compiler(options.jit_compile, strategy, "evaluation"),
        first.element_spec if of_one else None,
        first.source if of_one else None,
    )
    corpus = CorpusFigures(options.corpus_metrics, given, workers := Workers(strategy))
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
        corpus.names_in(eval_pipeline, evaluated.evaluation_metrics.names if evaluated else ()),
        training_layers,
        rows,
        update,
        EvaluationWeights(update.averages),
        given,
        corpus,
        VariablesFinite(kept_finite, workers),
        TrainedVariables(task, layers),
    )


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
    plan: StepPlan,
    train: Mapping[str, BatchPipeline],
    strategy: tf.distribute.Strategy,
    options: Options,
    layers: Sequence[keras.layers.Layer],
) -> UpdateStep:
    """Builds the optimizers' slots, the averages and the update."""
    allow_replica_writes(layers, strategy)
    statistics = Statistics(layers, strategy)
    per_replica = options.batch_moments == "per_replica"
    normalizing = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    communication = options.communication or Communication()
    all_reduce = AllReduce(strategy, communication)
    sharding = sharding_of(
        optimizers, plan.variables, all_reduce, strategy, options.shard_optimizer_state
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
        statistics=statistics,
        moved_alone=Statistics(normalizing, strategy) if per_replica else None,
        own=[v for v in plan.own if id(v) not in {id(t.value) for t in plan.trained}],
        complete=plan.known(layers) if has_step(task) else frozen_variables(layers),
        remat=Parts(options.remat, task, strategy) if options.remat else None,
        by_rows={
            id(variable)
            for name, own in plan.variables.items()
            if updates_rows(optimizers[name])
            for variable in own
        },
    )
    return UpdateStep(
        plan=plan,
        gradient=gradient,
        optimizers=optimizers,
        statistics=statistics,
        averages=averages,
        clips=gradient_path.clips_by_name(options.clip_norm, list(plan.groups)),
        loss_scale=loss_scale,
        sharding=sharding,
    )
