"""The Trainer: distributes the data, loops over the update on the devices, reads the results.

A loop goes up to the next thing worth a look: an evaluation, a checkpoint, a log, or about a second
of work.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl import gradients as gradient_path
from ddl import noise_scale
from ddl.actions import Action
from ddl.all_reduce import AllReduce, GradientDtype
from ddl.batch_size import check_batch_split
from ddl.coordinated_loop import CoordinatedEvaluation, CoordinatedLoop
from ddl.data import BatchPipeline, as_source
from ddl.data.checks import check_same_features
from ddl.distribution import Communication
from ddl.divergence import VariablesFinite, check_state_finite
from ddl.errors import ConfigError
from ddl.evaluation import Evaluation
from ddl.evaluation_weights import EvaluationWeights
from ddl.learning_rate import learning_rate_at
from ddl.model_checks import (
    check_variables,
    computes_in_float16,
    layers_of,
    warn_of_what_depends_on_replicas,
)
from ddl.noise_scale import GradientNoiseScale
from ddl.normalization import take_over_moments
from ddl.objective import Objective
from ddl.pace import Pace
from ddl.parameter_servers import has_parameter_servers
from ddl.precision import LossScale
from ddl.random import seed_by_replica
from ddl.statistics import Statistics, let_replicas_write
from ddl.step import UpdateStep
from ddl.stop_flag import StopFlag
from ddl.task import Task
from ddl.training_loop import TrainingLoop
from ddl.training_state import TrainingState
from ddl.weight_average import ExponentialMovingAverage, WeightAverages
from ddl.workers import Workers


class Trainer:
    """Trains a task with an optimizer on data, under a `tf.distribute` strategy.

    Model and optimizer are made under `strategy.scope()`:

        with strategy.scope():
            task = ddl.Classification(ddl.models.cnn((8, 8, 1), num_classes=10))
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        trainer = ddl.Trainer(task, optimizer, data, global_batch_size=64, strategy=strategy)
        trainer.train(500)
    """

    def __init__(
        self,
        task: Task,
        optimizer: keras.optimizers.Optimizer,
        train_data: Any,
        *,
        global_batch_size: int,
        eval_data: Any = None,
        strategy: tf.distribute.Strategy | None = None,
        seed: int = 0,
        shuffle: bool = True,
        accumulation_steps: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        weight_average: ExponentialMovingAverage | None = None,
        loss_scale: LossScale | Literal["auto"] | None = "auto",
        gradient_noise_scale: GradientNoiseScale | None = None,
        gradient_dtype: GradientDtype | None = None,
        max_skipped_updates: int = 50,
        steps_per_loop: int | None = None,
        data_on_device: bool | Literal["auto"] = "auto",
        communication: Communication | None = None,
    ) -> None:
        """Checks everything that can be checked before training, and builds the slots.

        Args:
          task: The model and its per-example loss.
          optimizer: Any Keras optimizer without Keras's own clipping, accumulation or average.
          train_data: A `ddl.data` source, a mapping of arrays, a pair (images, labels), or an
            unbatched `tf.data.Dataset` of known length.
          global_batch_size: Examples that one update consumes, over all replicas and
            microbatches.
          eval_data: As `train_data`; None if `evaluate` will not be called.
          strategy: None takes the one in whose scope this is called, if any.
          seed: Seed of the order of the examples, and of what layers of `ddl.layers` draw.
          shuffle: Whether each epoch has an order of its own.
          accumulation_steps: Microbatches that a replica's share of a batch is computed in.
          clip_norm: Largest global norm of the gradient of the global batch; None: no clipping.
          clip_value: Largest absolute value of its entries, instead of `clip_norm`.
          weight_average: Also keep an average of the weights, which evaluation and export use.
          loss_scale: `auto` takes a dynamic one if the model computes in float16, or gradients
            travel so.
          gradient_dtype: In which gradients travel between replicas, rounded; None: as they are.
          gradient_noise_scale: Also estimate the batch size worth using.
          max_skipped_updates: After how many overflows in a row training counts as diverged.
          steps_per_loop: Updates a Python call; None adapts to about a second.
          data_on_device: Whether arrays are kept on the devices and batches gathered there;
            `auto` decides by size. It never changes results.
          communication: How gradients travel.

        Raises:
          ConfigError: If an argument is out of range, or was made outside the scope.
          DataError: If the data are not what the task needs.
        """
        self.strategy = strategy or tf.distribute.get_strategy()
        self._workers = Workers(self.strategy)
        self.task = task
        self.model = task.model
        self.optimizer = optimizer
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.pace = Pace(steps_per_loop)
        self._max_skipped_updates = max_skipped_updates
        check_batch_split(global_batch_size, self.strategy.num_replicas_in_sync, accumulation_steps)
        if max_skipped_updates < 1:
            raise ConfigError(f"max_skipped_updates is {max_skipped_updates}; it is 1 or more")

        self._seed = seed
        self._train = self._pipeline(train_data, shuffle, data_on_device, accumulation_steps)
        self.num_examples = self._train.num_examples
        """Training examples."""
        self.steps_per_epoch = self._train.steps_per_epoch
        """Updates that see every training example once."""
        self.has_eval_data = eval_data is not None
        """Whether `evaluate` has something to evaluate on."""
        spec = self._train.element_spec
        pipeline = None
        if eval_data is not None:  # before the task is tried, which may miss a feature
            pipeline = self._pipeline(eval_data, False, data_on_device)
            check_same_features(spec, pipeline.element_spec)
        self._objective = objective = Objective(task, spec, global_batch_size, self.strategy)
        self.metric_names = objective.metrics.names
        """Names of the figures that `train` and `evaluate` return."""
        asynchronous = has_parameter_servers(self.strategy)
        evaluation = CoordinatedEvaluation if asynchronous else Evaluation
        self._evaluation = evaluation(objective, pipeline, self.strategy) if pipeline else None
        # The objective has built the model by now, if it was not.
        variables = check_variables(self.model, self.strategy)
        layers = layers_of(task)
        warn_of_what_depends_on_replicas(layers, self.strategy)
        take_over_moments(layers)
        self.generator_states = seed_by_replica(layers)
        """States of Keras's random generators."""
        let_replicas_write(layers, self.strategy)
        self._statistics = Statistics(layers, self.strategy)
        gradient_path.prepare_optimizer(optimizer, variables, self.strategy)
        if loss_scale == "auto":
            is_float16 = gradient_dtype == "float16" or computes_in_float16(self.model)
            loss_scale = LossScale() if is_float16 else None
        self._loss_scale = loss_scale
        self.averages: WeightAverages | None = None
        """The averages of the weights and of the statistics that belong to them."""
        if weight_average is not None:
            weights = [v.value for v in variables] + self._statistics.floating
            self.averages = WeightAverages(weight_average, weights, self.strategy)
        self._evaluation_weights = EvaluationWeights(self.averages, self._statistics, self.strategy)
        self.replica_statistics = self._evaluation_weights.replica_statistics
        """The copies of this worker's replicas of statistics that may differ, and of averages."""
        self._update = UpdateStep(
            strategy=self.strategy,
            objective=self._objective,
            optimizer=optimizer,
            variables=variables,
            statistics=self._statistics,
            averages=self.averages,
            pipeline=self._train,
            clip_norm=clip_norm,
            clip_value=clip_value,
            loss_scale=loss_scale,
            noise_scale=gradient_noise_scale,
            all_reduce=AllReduce(self.strategy, communication or Communication(), gradient_dtype),
        )
        self.state = TrainingState.initial(
            loss_scale.initial if loss_scale else 1.0, self._objective.metrics.zeros()
        )
        self._finite = VariablesFinite(
            [
                *(v.value for v in (*self.model.variables, *optimizer.variables)),
                *(self.averages.variables if self.averages else ()),
                *(copy for copies in self.replica_statistics for copy in copies[1:]),
            ],
            self._workers,
        )
        self._first_loop = True
        self._stop = StopFlag(self._workers)
        self._loop: TrainingLoop | CoordinatedLoop
        if asynchronous:
            self._loop = CoordinatedLoop(self._update, self.state)
        else:
            self._loop = TrainingLoop(self._update, max_skipped_updates, self._stop)

    # ------------------------------------------------------------ what can be asked

    @property
    def step(self) -> int:
        """Updates made so far."""
        return int(self.state.step)

    @property
    def trace_count(self) -> int:
        """How often the training loop has been traced: 1 after the first call, for good."""
        return self._loop.trace_count

    @property
    def skipped_updates(self) -> int:
        """Updates skipped so far because a gradient was not finite."""
        state = self.state
        return int(state.batches) - int(state.batches_left_out) - int(state.step)

    @property
    def loss_scale(self) -> float | None:
        """The present loss scale; None where there is none."""
        return float(self.state.loss_scale) if self._loss_scale else None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update made; of the first one before any."""
        return learning_rate_at(self.optimizer, max(self.step - 1, 0))

    # ------------------------------------------------------------ what can be done

    def train(self, steps: int, actions: Iterable[Action] = ()) -> dict[str, float]:
        """Makes `steps` further updates.

        Args:
          steps: How many.
          actions: Called after every loop; they say where a loop has to end.

        Returns:
          Means of loss and metrics since they were last read (`read_metrics`), here or by an
          action. After `request_stop` the sums go on.

        Raises:
          TrainingDiverged: If the loss is no longer finite, or too many updates in a row had
            to be skipped.
          ConfigError: If the task cannot be trained, or the model has its weights for evaluation.
          DataError: If the data cannot be read.
        """
        self.check_has_own_weights()
        actions = list(actions)
        end = self.step + steps
        while (step := self.step) < end:
            ends = [end, step + self._workers.of_chief(self.pace.steps_per_loop)]
            ends += [stop for a in actions if (stop := a.next_step(step)) is not None]
            self._run_loop(min(ends))
            if self.step > step:  # else what was to be done at this step has been done
                for action in actions:
                    action(self.step)
            if self._stop.take():
                return self.peek_metrics()
        return self.read_metrics()

    def request_stop(self) -> None:
        """Ends `train` after the update it is at, or the next one before any. From any thread.

        Several workers end theirs together, after a loop, if one of them was asked.
        """
        self._stop.raise_it()

    def trace(self) -> None:
        """Traces the training loop without running it, so that errors in the task show early."""
        self._loop.trace(self.state)

    def check_finite(self) -> None:
        """Raises TrainingDiverged if a weight, a slot, a statistic or an average is not finite."""
        self._finite.check(self.step)

    def evaluate(self, averaged: bool = True) -> dict[str, float]:
        """Means of loss and metrics over the evaluation data, each example counted once.

        Args:
          averaged: Of the averaged weights, where the trainer keeps an average. Within
            `evaluation_weights` the model is evaluated as it is there.

        Raises:
          ConfigError: If there is no evaluation data.
          DataError: If the data cannot be read.
        """
        if self._evaluation is None:
            raise ConfigError("there is nothing to evaluate on: give the trainer eval_data")
        with self.evaluation_weights(averaged):
            return self._evaluation.run()

    def evaluation_weights(self, averaged: bool = True) -> AbstractContextManager[None]:
        """Gives the model, in the `with` block, the weights that are evaluated and exported.

        They are the averages, if the trainer keeps any and `averaged` is True, or the model's own;
        moments that are not synchronized are the mean over the replicas. Its own come back to the
        bit. Training and checkpoints want these. Eager, cross-replica context.
        """
        return self._evaluation_weights.applied(averaged)

    def check_has_own_weights(self) -> None:
        """Raises ConfigError within `evaluation_weights`."""
        self._evaluation_weights.check_not_applied()

    def read_metrics(self) -> dict[str, float]:
        """Means since the last reading, with `gradient_norm` where gradients are clipped.

        And `gradient_noise_scale` where it is estimated, an average over all updates so far.
        """
        means, self.state = self.peek_metrics(), self.state.without_metrics()
        return means

    def peek_metrics(self) -> dict[str, float]:
        """As `read_metrics`, but the sums go on."""
        means = self._objective.metrics.means(self.state.sums)
        total, count = self.state.gradient_norms.numpy()
        if self._update.clip_norm is not None and count:
            means["gradient_norm"] = float(total / count)
        return means | noise_scale.figures(self.state.gradient_noise)

    def restore(self, state: TrainingState) -> None:
        """Goes on from `state`, after model and optimizer were given their values of then."""
        self.state = state
        self._loop.reset()

    # ------------------------------------------------------------ the loops

    def _run_loop(self, end: int) -> None:
        start = self.step
        with self.pace.loop() as timer:
            self.state = self._loop.run(self.state, end)
            timer.steps = self.step - start
            timer.traced = self._first_loop
        self._first_loop = False
        check_state_finite(self.state, self._update, self._max_skipped_updates)

    def _pipeline(
        self, data: Any, shuffle: bool, resident: bool | Literal["auto"], microbatches: int = 1
    ) -> BatchPipeline:
        source = as_source(data)
        check = getattr(self.task, "check", None)
        if check is not None:
            check(source)
        sizes = {"global_batch_size": self.global_batch_size, "microbatches": microbatches}
        return BatchPipeline(source, seed=self._seed, shuffle=shuffle, resident=resident, **sizes)
