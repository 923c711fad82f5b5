"""The parts of a trainer, built and checked in the order in which they need each other."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.data import BatchPipeline, as_source
from ddl.data.checks import check_same_features
from ddl.distribution.communication import Communication
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.layers.normalization import take_over_moments
from ddl.precision import LossScale
from ddl.random import seed_by_replica
from ddl.step import gradients as gradient_path
from ddl.step.all_reduce import AllReduce, GradientDtype
from ddl.step.moving_statistics import Statistics, allow_replica_writes
from ddl.step.noise_scale import GradientNoiseScale
from ddl.step.objective import Objective
from ddl.step.update import UpdateStep
from ddl.step.weight_average import ExponentialMovingAverage, WeightAverages
from ddl.tasks.parts import layers_of
from ddl.tasks.task import Task
from ddl.training.asynchronous.loop import CoordinatedEvaluation
from ddl.training.checks.fixed_settings import FixedSettings
from ddl.training.checks.model import (
    check_variables,
    computes_in_float16,
    frozen_variables,
    warn_of_replica_dependence,
)
from ddl.training.checks.row_independence import RowIndependence
from ddl.training.divergence import VariablesFinite
from ddl.training.evaluation import Evaluation
from ddl.training.evaluation_weights import EvaluationWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `ddl.Trainer` that its parts read; each means what it means there."""

    global_batch_size: int
    seed: int
    shuffle: bool
    accumulation_steps: int
    clip_norm: float | None
    clip_value: float | None
    weight_average: ExponentialMovingAverage | None
    loss_scale: LossScale | Literal["auto"] | None
    gradient_noise_scale: GradientNoiseScale | None
    gradient_dtype: GradientDtype | None
    data_on_device: bool | Literal["auto"]
    communication: Communication | None


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of a trainer.

    Attributes:
      workers: The workers of the strategy.
      train: Pipeline of the training data.
      eval_pipeline: Pipeline of the evaluation data, if any.
      objective: The objective, which has built the model.
      evaluation: The evaluation; None without evaluation data.
      rows: Check that rows are independent of each other.
      generator_states: States of the Keras seed generators in the task's layers: int64 [2] each.
      update: The update, with the averages and the statistics.
      evaluation_weights: The weights for evaluation.
      finite: Check of all variables that an update may change.
      settings: The settings that must not change.
    """

    workers: Workers
    train: BatchPipeline
    eval_pipeline: BatchPipeline | None
    objective: Objective
    evaluation: Evaluation | CoordinatedEvaluation | None
    rows: RowIndependence
    generator_states: list[tf.Variable]
    update: UpdateStep
    evaluation_weights: EvaluationWeights
    finite: VariablesFinite
    settings: FixedSettings

    def check_for_training(self) -> None:
        """Raises ConfigError for a changed setting, or rows that depend on each other."""
        self.settings.check_for_training()
        modes = [True] if self.eval_pipeline is None else [True, False]
        with self.workers.failing_together():
            self.rows.check(self.train, modes)

    def check_for_evaluation(self) -> None:
        """Raises ConfigError as `check_for_training`, of what the evaluation reads."""
        self.settings.check_for_evaluation()
        if self.eval_pipeline is not None:
            self.rows.check(self.eval_pipeline, [False])


def assemble(
    task: Task,
    optimizer: keras.optimizers.Optimizer,
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
      ConfigError: If an argument is out of range, model or optimizer was made outside the scope, or
        the optimizer was used before.
      DataError: If the data do not fit the task.
    """
    train = _pipeline(task, train_data, options, options.shuffle, options.accumulation_steps)
    eval_pipeline = None
    if eval_data is not None:  # before `Objective` runs the task, which may miss a feature
        eval_pipeline = _pipeline(task, eval_data, options)
        check_same_features(train.element_spec, eval_pipeline.element_spec)
    objective = Objective(task, train.element_spec, options.global_batch_size, strategy)
    evaluation: Evaluation | CoordinatedEvaluation | None = None
    if eval_pipeline is not None:
        kind = CoordinatedEvaluation if traits_of(strategy).asynchronous else Evaluation
        evaluation = kind(objective, eval_pipeline, strategy)
    # `Objective` has built the model.
    variables = check_variables(task.model, strategy)
    layers = layers_of(task)
    warn_of_replica_dependence(objective.training_layers, strategy, options.accumulation_steps)
    rows = RowIndependence(task, layers, strategy)
    take_over_moments(layers)
    generator_states = seed_by_replica(layers)
    update = _update(task.model, optimizer, objective, train, strategy, options, layers, variables)
    weights = EvaluationWeights(update.averages, update.statistics, strategy)
    workers = Workers(strategy)
    kept_finite = [
        *(v.value for v in (*task.model.variables, *optimizer.variables)),
        *(update.averages.variables if update.averages else ()),
        *(copy for copies in weights.replica_statistics for copy in copies[1:]),
    ]
    return Assembly(
        workers,
        train,
        eval_pipeline,
        objective,
        evaluation,
        rows,
        generator_states,
        update,
        weights,
        VariablesFinite(kept_finite, workers),
        FixedSettings(task, layers, optimizer, variables),
    )


def _pipeline(
    task: Task, data: Any, options: Options, shuffle: bool = False, microbatches: int = 1
) -> BatchPipeline:
    source = as_source(data)
    check = getattr(task, "check", None)
    if check is not None:
        check(source)
    return BatchPipeline(
        source,
        options.global_batch_size,
        seed=options.seed,
        shuffle=shuffle,
        resident=options.data_on_device,
        microbatches=microbatches,
    )


def _update(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    objective: Objective,
    pipeline: BatchPipeline,
    strategy: tf.distribute.Strategy,
    options: Options,
    layers: Sequence[keras.layers.Layer],
    variables: list[keras.Variable],
) -> UpdateStep:
    """Builds the optimizer's slots, the averages and the update."""
    allow_replica_writes(layers, strategy)
    statistics = Statistics(layers, strategy)
    gradient_path.prepare_optimizer(optimizer, variables, strategy)
    loss_scale = options.loss_scale
    if loss_scale == "auto":
        is_float16 = options.gradient_dtype == "float16" or computes_in_float16(model)
        loss_scale = LossScale() if is_float16 else None
    averages = None
    if options.weight_average is not None:
        weights = [v.value for v in variables] + statistics.floating
        averages = WeightAverages(options.weight_average, weights, strategy)
    communication = options.communication or Communication()
    return UpdateStep(
        strategy=strategy,
        objective=objective,
        optimizer=optimizer,
        variables=variables,
        frozen=frozen_variables(layers),
        statistics=statistics,
        averages=averages,
        pipeline=pipeline,
        clip_norm=options.clip_norm,
        clip_value=options.clip_value,
        loss_scale=loss_scale,
        noise_scale=options.gradient_noise_scale,
        all_reduce=AllReduce(strategy, communication, options.gradient_dtype),
    )
