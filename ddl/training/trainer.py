"""The Trainer: builds data, losses and update, runs the loop on the devices, reads the results."""

import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import tensorflow as tf
from absl import logging

from ddl.choices import BatchMoments, JitCompile, check_positive, check_types
from ddl.data.conversion import sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.communication import number_collectives
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, did_you_mean
from ddl.figures import GRADIENT_NORM
from ddl.layers.checks import check_computes_by_row, warn_of_inference
from ddl.layers.normalization import take_over_moments, warn_of_batch_moments
from ddl.metrics import CorpusMetric
from ddl.metrics.history import History
from ddl.optimizers.checks import check_counts
from ddl.optimizers.fused import updates_rows
from ddl.optimizers.groups import Optimizers, by_name, figure, from_keras_name, last_rates
from ddl.optimizers.schedules import length_in_steps
from ddl.optimizers.weight_average import ExponentialMovingAverage, WeightAverages
from ddl.precision import LossScale
from ddl.random import hashed
from ddl.signals import deferring_interrupt
from ddl.step.clipping import Limit, clips_by_name
from ddl.step.compiled import Compiler
from ddl.step.engine import BUILT_IN
from ddl.step.global_gradient import GlobalGradient
from ddl.step.moving_statistics import allow_replica_writes, statistics_of
from ddl.step.overflow import known_loss_scale
from ddl.step.planning import may_depend_on, plan_of
from ddl.step.remat import recomputed
from ddl.step.replicas import AllReduce
from ddl.step.sharding import sharding_of
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.tasks.checks import check_data
from ddl.tasks.parts import layers_of
from ddl.tasks.task import StepTask, Task, check_task, has_step
from ddl.training import checks
from ddl.training.evaluation import Evaluations, Rows, evaluation_pipeline, joined
from ddl.training.pace import Pace
from ddl.training.probes import Probes
from ddl.training.progress import shown
from ddl.training.runner import AfterLoop, LoopRunner


class Trainer:
    """Trains a task with an optimizer on data, under a `tf.distribute` strategy.

    Create the model and the optimizer under `strategy.scope()`:

        with strategy.scope():
            task = ddl.Classification(ddl.models.cnn((8, 8, 1), num_classes=10))
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        trainer = ddl.Trainer(task, optimizer, data, global_batch_size=64, strategy=strategy)
        trainer.train(500)

    The constructor fixes all arguments, attributes, and the set of trained variables.

    Attributes:
      task, strategy, optimizer, global_batch_size, accumulation_steps: As given.
      model: The task's `model`; None if it keeps its models in other attributes.
      pace: Speed and length of the training loops.
      pipelines: Pipeline of each source of training data, by its name; "" if there is only one.
      inputs: Specs of the arguments of each subclassed model that a loss calls, by its id.
      eval_pipeline: Pipeline of the evaluation data; None without any.
      normalizes: Whether a layer takes statistics of a microbatch in training.
      sharding: The shares of the optimizers' slots; None if each replica holds whole slots.
      averages: Averages of weights and moving statistics; None without `weight_average`.
      metric_names: Names of loss and metrics that `train` returns: "loss" or "loss/NAME"; metrics.
      eval_metric_names: Those that `evaluate` returns, "loss" first; () without evaluation data.
      updates_per_step: Updates of each optimizer in a step; None if a tensor says how many.
      history: Figures that training and evaluation have read, by step.
    """

    def __init__(
        self,
        task: Task | StepTask,
        optimizer: Optimizers | str,
        train_data: Any,
        *,
        global_batch_size: int | Mapping[str, int],
        eval_data: Any = None,
        corpus_metrics: CorpusMetric | Sequence[CorpusMetric] = (),
        strategy: tf.distribute.Strategy | None = None,
        seed: int = 0,
        shuffle: bool = True,
        accumulation_steps: int = 1,
        batch_moments: BatchMoments = "global",
        clip_norm: Limit = None,
        weight_average: ExponentialMovingAverage | None = None,
        loss_scale: LossScale | Literal["auto"] | None = "auto",
        max_skipped_updates: int = 50,
        steps_per_loop: int | None = None,
        data_on_device: bool | Literal["auto"] = "auto",
        jit_compile: JitCompile = "auto",
        remat: str | Sequence[str] = (),
        shard_optimizer_state: bool = False,
    ) -> None:
        """Checks everything that can be checked before training, and builds the optimizer slots.

        Args:
          task: The model and its per-example loss, or a task with a step of its own.
          optimizer: Any Keras optimizer without Keras's own clipping, accumulation or average, or
            `ParameterGroups` of such; for a task with a `step` also a dict from name to these.
            Names of Keras's optimizers, such as "adam", take their default arguments.
          train_data: Arrays: a dict by feature, or a tuple (x, y) or (x, y, weights) of which x may
            be a dict; a reader or stream of `ddl.data`; an object with `__len__` and `__getitem__`;
            or a `tf.data.Dataset` or `keras.utils.PyDataset` of examples or of batches, which are
            taken apart. With a `step` also a dict of these.
          global_batch_size: Examples of a batch, over all replicas and microbatches; or that of
            each source by its name.
          eval_data: As `train_data`, for `evaluate`.
          corpus_metrics: Functions of all outputs of an evaluation, whose figures it adds.
          strategy: None takes the strategy of the current scope, if any.
          seed: Seed of the order of the examples, and of all draws without a seed of their own.
          shuffle: Whether to reshuffle the training data each epoch; a stream keeps its order.
          accumulation_steps: Microbatches per replica and update.
          batch_moments: Rows that give BatchNormalization its moments: "global", those of the
            microbatch on all replicas; "per_replica", those of each replica, so that the number of
            replicas changes the result, and moving moments are means over the replicas.
          clip_norm: Largest global norm of the gradient, or that of each optimizer by its name;
            the norm before clipping is logged. Infinity clips nothing.
          weight_average: Keeps an average of the weights, which evaluation and export use.
          loss_scale: "auto" scales the loss dynamically if the model computes in float16.
          max_skipped_updates: Consecutive overflows after which training counts as diverged.
          steps_per_loop: Updates per call of the training loop; None adapts to about a second.
          data_on_device: Whether arrays lie on the devices; "auto" decides by size.
          jit_compile: Whether XLA compiles the passes and the update, which changes only rounding:
            "on", "off", or "auto": on GPUs, except for what XLA cannot compile.
          remat: Patterns of names of layers, such as "block_*", that the backward pass computes
            again, to take less memory. Results do not change.
          shard_optimizer_state: Whether each replica keeps the slots of its share of the weights
            alone, to take less memory. Changes only rounding.

        Raises:
          ConfigError: If an argument is out of range, model or optimizer was made outside the
            scope, or the optimizer was used before.
          DataError: If the data do not fit the task.
        """
        check_types(Trainer.__init__, locals(), ("task", "optimizer", "corpus_metrics", "return"))
        check_task(task)
        task = cast(Task, task)
        check_positive("Trainer.max_skipped_updates", max_skipped_updates)
        self.task: Any = task  # whose own attributes a type checker does not know
        self.model = getattr(task, "model", None)
        self.strategy = strategy = strategy or tf.distribute.get_strategy()
        number_collectives(strategy)
        self._workers = workers = Workers(strategy)
        check_computes_by_row(layers_of(task))
        self.optimizer = from_keras_name(optimizer, strategy)
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.pace = Pace(steps_per_loop)
        # ---------------------------------------------------------- data
        sources = sources_by_name(train_data)
        sizes = checks.sizes_by_source(global_batch_size, list(sources))
        replicas = strategy.num_replicas_in_sync
        for size in sizes.values():
            checks.check_batch_split(size, replicas, accumulation_steps)
        check_data(task, sources)
        self.pipelines = train = {
            name: BatchPipeline(
                source,
                sizes[name],
                seed=seed,
                # Sources of one length would otherwise have one order.
                order_seed=hashed(seed, name) if name else seed,
                shuffle=shuffle,
                resident=data_on_device,
                microbatches=accumulation_steps,
            )
            for name, source in sources.items()
        }
        self.eval_pipeline: BatchPipeline | None = None
        named = {f"training data {n!r}" if n else "training data": one for n, one in train.items()}
        if eval_data is not None:
            self.eval_pipeline = named["evaluation data"] = evaluation_pipeline(
                task, eval_data, "Trainer.eval_data", train, data_on_device
            )
        checks.check_same_data(workers, named)
        # ---------------------------------------------------------- losses
        optimizers = by_name(self.optimizer)
        probes = Probes(task, strategy, list(optimizers.values()))
        with workers.failing_together():
            plan = plan_of(
                task, self.optimizer, lambda of, name: probes.loss(train[name], of), strategy, train
            )
            probes.check_read()
        compiler = Compiler(jit_compile, strategy, "evaluation")
        self._evaluations = Evaluations(probes, train, self.eval_pipeline, corpus_metrics, compiler)
        # ---------------------------------------------------------- update
        layers = layers_of(task)  # with those that the probes have built
        normalizing = plan.normalizing
        self.inputs, self.normalizes = plan.inputs, bool(normalizing)
        alone = batch_moments == "per_replica"
        warn_of_batch_moments(normalizing, replicas if alone else 1, accumulation_steps)
        checks.warn_of_tf32(strategy)
        if not has_step(task):
            form = plan.losses[BUILT_IN].form
            warn_of_inference(task, layers, form.layers, form.placing != {})
        take_over_moments(layers)
        allow_replica_writes(layers, strategy)
        statistics = statistics_of(layers, strategy)
        all_reduce = AllReduce(strategy)
        updated, shards = {n: x.variables for n, x in plan.applied.items()}, shard_optimizer_state
        self.sharding = sharding_of(optimizers, updated, all_reduce, strategy, shards)
        scale = known_loss_scale(loss_scale, layers, strategy)
        rule, averaged = weight_average, [v.value for v in plan.trained]
        averaged += [v for v in statistics if v.dtype.is_floating]
        self.averages = WeightAverages(rule, averaged, strategy) if rule else None
        gradient = GlobalGradient(
            strategy=strategy,
            compiler=Compiler(jit_compile, strategy, "training"),
            pipelines=train,
            all_reduce=all_reduce,
            scales=scale is not None,
            local_moments=statistics_of(normalizing, strategy) if alone else None,
            may_depend_on=may_depend_on(task, plan, layers),
            remat=recomputed(remat, task, strategy) if remat else None,
            by_rows={id(v) for n in updated if updates_rows(optimizers[n]) for v in updated[n]},
            sharding=self.sharding,
        )
        clips = clips_by_name(clip_norm, list(plan.groups))
        self._train_step = train_step = TrainStep(
            task, plan, gradient, optimizers, statistics, self.averages, clips, scale
        )
        checks.warn_of_dense_updates(train_step)
        self.metric_names = train_step.metrics.names
        self.eval_metric_names = self._evaluations.names
        self.updates_per_step = {name: one.times for name, one in plan.applied.items()}
        self.history = History()
        self._last_read = 0  # step of the last `read_metrics`
        self._finite = checks.finite_variables(train_step)
        self._runner = LoopRunner(train_step, workers, self.pace, max_skipped_updates)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ConfigError for a public attribute whose assignment would have no effect."""
        if "_runner" in vars(self) and name != "state" and not name.startswith("_"):
            known = {*vars(self), *inspect.signature(Trainer).parameters}
            meant = "" if name in known else did_you_mean(name, known)
            raise ConfigError(
                f"trainer.{name} cannot be set after the Trainer is created.{meant} Create a new "
                "Trainer with a new optimizer; or assign to trainer.optimizer.learning_rate."
            )
        super().__setattr__(name, value)

    def train(
        self,
        steps: int | None = None,
        after_loop: Iterable[AfterLoop] = (),
        *,
        epochs: float | None = None,
        progress: bool = True,
    ) -> dict[str, float]:
        """Makes further updates. Eager, cross-replica context, on all workers.

        Args:
          steps: Number of updates, at least 0.
          after_loop: Called after each loop that made an update, with the step; `next_step` limits
            the loop's length.
          epochs: Number of passes over the training data, instead of `steps`.
          progress: Whether to show a progress bar in a terminal or a notebook.

        Returns:
          Means of loss and metrics since they were last read (`read_metrics`). After `request_stop`
          the metrics are returned but not reset.

        Raises:
          TrainingDiverged: If the loss is not finite, or if `max_skipped_updates` updates in a row
            were skipped.
          KeyboardInterrupt: On SIGINT, in the main thread, after the end of the loop.
          ConfigError: If not one length is given, the task cannot be trained, the model holds the
            evaluation weights, or other variables are to be trained than before.
          DataError: If the data cannot be read.
        """
        self.check_idle("Trainer.train")
        if epochs is not None:
            self.count_examples()
        end = self.step + length_in_steps(steps, epochs, self.steps_per_epoch)
        self.check_consistent()
        self._runner.fixed.check()
        with (
            deferring_interrupt(self.request_stop, self.withdraw_stop),
            shown(end, progress and self._workers.is_chief, self.peek_metrics) as bars,
        ):
            stopped = self._runner.run(end, [*bars, *after_loop])
            return self.peek_metrics() if stopped else self.read_metrics()

    def request_stop(self) -> None:
        """Ends `train` after the current update. May be called from any thread.

        On one replica with resident data, where XLA compiles several updates at once, `train` may
        end up to 32 updates later. If `train` is not running, the next call ends before its first
        update. Several workers, and parameter servers, end after the current loop, if any worker
        calls this method.
        """
        self._runner.stop.assign(True)

    def withdraw_stop(self) -> None:
        """Withdraws a request to stop that no training has answered yet."""
        self._runner.stop.assign(False)

    def trace(self) -> None:
        """Traces the training loop without running it, to raise errors in the task early."""
        self._runner.loop.trace(self.state)

    def check_finite(self) -> None:
        """Raises TrainingDiverged if a weight, slot, statistic or average is not finite.

        Variables that were never finite are ignored. Eager, cross-replica context, on all workers.
        """
        checks.check_finite(self._finite, self._workers, self.step)

    def check_consistent(self) -> None:
        """Raises ConfigError if model, optimizer and state do not belong to the same step.

        An optimizer whose number of updates depends on a tensor (`Update.when`) is not checked.
        """
        self._runner.weights.check_not_applied()
        self._runner.check_not_lost()
        for part in self._train_step.plan.applied.values():
            if part.times is not None:
                check_counts(part.optimizer, self.step * part.times)

    def check_idle(self, call: str) -> None:
        """Raises ConfigError for a call while `train` runs, or within `evaluation_weights`."""
        self._runner.check_idle(call)

    def evaluate(self, data: Any = None, *others: Any, averaged: bool = True) -> dict[str, float]:
        """Returns loss and metrics of a data set, each example counted once.

        Eager, cross-replica context, on all workers.

        Args:
          data: As `train_data`; None takes `eval_data`, and adds the means to `history` if they
            are of the averages, or there are none.
          *others: Must be empty.
          averaged: Whether to evaluate the averaged weights, but within `evaluation_weights`.

        Raises:
          ConfigError: If there are no data, or several.
          DataError: If the data cannot be read, do not fit the task, or have no weight.
          KeyboardInterrupt: On SIGINT, in the main thread, after the evaluation.
        """
        self._runner.check_not_lost()
        if others:
            raise ConfigError("evaluate takes one data set. Pass a tuple: evaluate((x, y)).")
        with deferring_interrupt(), self.evaluation_weights(averaged=averaged):
            means = self._evaluations.means(data, self.state)
            if data is None and averaged:
                self.history.write(self.step, self.epoch_at(self.step), "eval", means)
        return means

    def predict(self, data: Any) -> Any:
        """Returns the outputs of the task's `predict` for each example, in order.

        Eager, cross-replica context, on all workers.

        Args:
          data: As `train_data`, of features that `predict` reads; or an array of inputs alone.

        Returns:
          Arrays [n, …], in the structure that `predict` of the task returns.

        Raises:
          ConfigError: If the task has no `predict` or its outputs are not [batch, …].
          DataError: If the data cannot be read, or do not fit the task.
          KeyboardInterrupt: On SIGINT, in the main thread, after the prediction.
        """
        self._runner.check_not_lost()
        with deferring_interrupt(), self.evaluation_weights():
            return joined(list(self._evaluations.outputs(data, self.state)))[0]

    def predict_batches(
        self, data: Any, *, features: Sequence[str] = (), first_batch: int = 0
    ) -> Generator[Rows, None, None]:
        """Yields the outputs of the task's `predict` batch by batch, which needs little memory.

        The model holds the evaluation weights until the iterator ends or is closed. With several,
        the first determines the weights, and the last one restores the model's own. Eager,
        cross-replica context, on all workers, each of which must take all batches.

        Args:
          data: As in `predict`.
          features: Names of features of the data to yield beside the outputs.
          first_batch: Number of the first batch, counted from 0; batches have `global_batch_size`
            rows.

        Yields:
          The outputs, arrays [b, …] in the structure of `predict`, and a dict of the features.

        Raises:
          DataError: If the data lack one of `features`. Other errors are those of `predict`.
        """
        self._runner.check_not_lost()
        with self.evaluation_weights():
            yield from self._evaluations.outputs(data, self.state, features, first_batch)

    def evaluation_weights(self, *, averaged: bool = True) -> AbstractContextManager[None]:
        """Gives the model the weights for evaluation and export within the `with` block.

        These weights are the averages, if the trainer keeps them, `averaged` is True and an update
        was made; before the first, the model may have other weights than the averages begin with.
        After the block, and after the last open iterator of `predict_batches`, the model's own
        weights are restored bit for bit; training and checkpoints need these. Eager, cross-replica
        context, on all workers.
        """
        return self._runner.weights.applied(averaged and self.step > 0)

    @property
    def state(self) -> TrainingState:
        """Training state other than model and optimizer.

        Assigning resumes from another state: restore the variables of model and optimizer first.
        """
        return self._runner.state

    @state.setter
    def state(self, state: TrainingState) -> None:
        self.check_idle("Restoring a state")
        self._runner.restore(state)
        self._last_read = self.step
        self.history.drop_after(self.step)

    @property
    def step(self) -> int:
        """Number of updates made so far."""
        return self._runner.step

    @property
    def variables_in_use(self) -> list[tf.Variable]:
        """Variables that the traced loop uses and keeps; empty with parameter servers."""
        stand_ins = self.sharding.handles_of_stand_ins if self.sharding else ()
        used = self._runner.loop.variables
        return [variable for variable in used if id(variable.handle) not in stand_ins]

    @property
    def skipped_updates(self) -> int:
        """Number of updates skipped so far because a gradient was not finite."""
        state = self.state
        return int(state.batches) - int(state.batches_left_out) - int(state.step)

    @property
    def loss_scale(self) -> float | None:
        """Current loss scale; None without loss scaling."""
        return float(self.state.loss_scale) if self._train_step.loss_scale else None

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rate of each optimizer's last update, or of the first before any.

        The names are "learning_rate" or "learning_rate/NAME".
        """
        return last_rates(self._train_step.optimizers)

    def read_metrics(self) -> dict[str, float]:
        """Returns the means of loss and metrics since the last read, and resets them.

        Adds them to `history`. With `clip_norm`, the result also holds "gradient_norm", the mean
        global norm before clipping, with a "/NAME" for each of several optimizers.
        """
        (first, last), means = (self._last_read, self.step), self.peek_metrics()
        if last > first and self._train_step.metrics.weight(self.state.sums) == 0:
            text = f"All examples of the updates {first + 1:,} to {last:,} have weight 0"
            logging.warning("%s, so the mean loss is NaN.", text)
        self._runner.state, self._last_read = self.state.without_metrics(), last
        if last > first:
            self.history.write(last, self.epoch_at(last), "train", means)
        return means

    def peek_metrics(self) -> dict[str, float]:
        """Returns the same means as `read_metrics`, without resetting or recording them."""
        means = self._train_step.metrics.means(self.state.sums)
        norms = self.state.gradient_norms.numpy().reshape(-1, 2)
        for name, (total, count) in zip(self._train_step.plan.groups, norms, strict=True):
            if self._train_step.clips[name] is not None and count:
                means[figure(GRADIENT_NORM, name)] = float(total / count)
        return means

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates in which each example of the first source is seen once; None if unknown."""
        return next(iter(self.pipelines.values())).steps_per_epoch

    def count_examples(self) -> None:
        """Counts the examples of data of unknown length; DataError if they have no end."""
        next(iter(self.pipelines.values())).count_examples()

    def epoch_at(self, step: int) -> float:
        """Returns the passes over the training data at a step; 0 for data of unknown length."""
        return step / self.steps_per_epoch if self.steps_per_epoch else 0.0
