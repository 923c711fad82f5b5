"""The Trainer: distributes the data, runs the training loop on the devices, reads the results."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import tensorflow as tf

from ddl.choices import BatchMoments, JitCompile
from ddl.distribution.communication import Communication, number_collectives
from ddl.metrics import OfAllOutputs
from ddl.optimizers.groups import Optimizers, from_keras_name
from ddl.precision import LossScale
from ddl.signals import deferring_interrupt
from ddl.step.gradients import Limit
from ddl.step.remat import Remat
from ddl.step.state import TrainingState
from ddl.step.weight_average import ExponentialMovingAverage
from ddl.tasks.task import StepTask, Task, check_task
from ddl.training import optimizer_counts
from ddl.training.actions import Action, checked_actions, length_in_steps
from ddl.training.assembly import assemble
from ddl.training.checks.arguments import Options, check_strategy
from ddl.training.checks.batch_size import check_batch_split
from ddl.training.checks.fixed_settings import check_attribute
from ddl.training.checks.tables import warn_of_dense_updates
from ddl.training.metric_reader import MetricReader
from ddl.training.pace import Pace
from ddl.training.results.earlier import free_unused, note_arrays
from ddl.training.results.evaluating import Evaluating
from ddl.training.results.history import History
from ddl.training.results.progress import shown
from ddl.training.runner import LoopRunner


class Trainer(Evaluating):
    """Trains a task with an optimizer on data, under a `tf.distribute` strategy.

    Create the model and the optimizer under `strategy.scope()`:

        with strategy.scope():
            task = ddl.Classification(ddl.models.cnn((8, 8, 1), num_classes=10))
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        trainer = ddl.Trainer(task, optimizer, data, global_batch_size=64, strategy=strategy)
        trainer.train(500)

    The constructor fixes all arguments and attributes, and the set of trained variables. To change
    one, make a new Trainer with a new optimizer.
    """

    def __init__(
        self,
        task: Task | StepTask,
        optimizer: Optimizers | str,
        train_data: Any,
        *,
        global_batch_size: int | Mapping[str, int],
        eval_data: Any = None,
        corpus_metrics: OfAllOutputs | Sequence[OfAllOutputs] = (),
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
        communication: Communication | None = None,
        jit_compile: JitCompile = "auto",
        remat: Remat | None = None,
        shard_optimizer_state: bool = False,
    ) -> None:
        """Checks everything that can be checked before training, and builds the optimizer slots.

        Args:
          task: The model and its per-example loss, or a task with a step of its own.
          optimizer: Any Keras optimizer without Keras's own clipping, accumulation or average, or
            `ParameterGroups` of such; for a task with a `step` also a dict from name to these.
            "adam" and other names of Keras's optimizers take their default arguments.
          train_data: Arrays: a dict by feature, or a tuple (x, y) or (x, y, weights) of which x may
            be a dict; a reader or stream of `ddl.data`; an object with `__len__` and `__getitem__`;
            or a `tf.data.Dataset` or `keras.utils.PyDataset` of examples or of batches, which are
            taken apart. With a `step` also a dict of these.
          global_batch_size: Examples of a batch, over all replicas and microbatches; or that of
            each source by its name.
          eval_data: As `train_data`; None if `evaluate` will not be called.
          corpus_metrics: Functions of all outputs of an evaluation, whose figures it adds.
          strategy: None takes the strategy of the current scope, if any.
          seed: Seed of the order of the examples, and of the random draws of `ddl.layers`.
          shuffle: Whether to reshuffle the training data each epoch. A stream, such as a
            `tf.data.Dataset`, keeps its own order; evaluation data are never shuffled.
          accumulation_steps: Microbatches per replica and update.
          batch_moments: Rows that give BatchNormalization its moments: "global", those of the
            microbatch on all replicas; "per_replica", those of each replica, without communication.
            The number of replicas then changes the result, and the moving moments are their means
            over the replicas.
          clip_norm: Largest global norm of the gradient of the global batch, or that of each
            optimizer by its name; None: no clipping.
          weight_average: Keeps an average of the weights, which evaluation and export use; None:
            no average.
          loss_scale: "auto" uses dynamic loss scaling if the model computes in float16; None:
            no loss scaling.
          max_skipped_updates: Consecutive overflows after which training counts as diverged.
          steps_per_loop: Updates per call of the training loop; None adapts to about a second.
          data_on_device: Whether to keep the arrays on the devices and gather batches there; "auto"
            decides by size. Results do not change.
          communication: Options of the all-reduce: collectives, buffer size, timeout.
          jit_compile: Whether XLA compiles forward and backward pass, and the update: "on", "off",
            or "auto": on GPUs, except for what XLA cannot compile. Changes only rounding.
          remat: Selects layers that the backward pass computes again, to take less memory; None:
            none. Results do not change.
          shard_optimizer_state: Whether each replica keeps the slots of its share of the weights
            alone, to take less memory. Changes only rounding. `optimizer.variables` then hold
            shares.

        Raises:
          ConfigError: If an argument is out of range, model or optimizer was made outside the
            scope, or the optimizer was used before.
          DataError: If the data do not fit the task.
        """
        given = locals()
        of_subclass = frozenset(vars(self))
        free_unused()
        check_task(task)
        task = cast(Task, task)
        check_strategy(strategy)
        self.strategy = strategy or tf.distribute.get_strategy()
        number_collectives(self.strategy)
        self.task: Any = task  # whose own attributes a type checker does not know
        self.model = getattr(task, "model", None)
        """The task's `model`; None if it keeps its models in other attributes."""
        optimizer = from_keras_name(optimizer, self.strategy)
        self.optimizer = optimizer
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.jit_compile = jit_compile
        self.pace = Pace(steps_per_loop)
        check_batch_split(global_batch_size, self.strategy.num_replicas_in_sync, accumulation_steps)
        options = Options.of(given)
        parts = assemble(task, optimizer, train_data, eval_data, self.strategy, options)
        warn_of_dense_updates(parts.update)
        self._parts = parts
        own = [] if parts.eval_pipeline is None else [parts.eval_pipeline]
        note_arrays(self, [*parts.train.values(), *own])
        self.pipelines = parts.train
        """Pipeline of each source of training data, by its name; "" if there is only one."""
        self.eval_pipeline = parts.eval_pipeline
        """Pipeline of the evaluation data; None without any."""
        self.has_eval_data = eval_data is not None
        """Whether the trainer has evaluation data."""
        self.training_layers = parts.training_layers
        """Layers of the task, without those that only compute as in an evaluation."""
        self.metric_names = parts.update.metrics.names
        """Names of the figures that `train` returns: "loss", or "loss/NAME" of each; metrics."""
        self.eval_metric_names = parts.eval_metric_names
        """Names of the metrics that `evaluate` returns, "loss" first; () if the task has none."""
        self.updates_per_step = {name: one.times for name, one in parts.update.plan.applied.items()}
        """Updates of each optimizer in a step, by its name; None if that depends on a tensor."""
        self.sharding = parts.update.sharding
        """The shares of the optimizers' slots; None if each replica holds whole slots."""
        self.averages = parts.update.averages
        """Averages of the weights and of the moving statistics; None without `weight_average`."""
        self.history = History()
        """Figures that training and evaluation have read, by step."""
        self._metrics = MetricReader(parts.update)
        self._runner = LoopRunner(
            parts.update,
            parts.workers,
            self.pace,
            parts.trained,
            parts.evaluation_weights,
            max_skipped_updates,
        )
        arguments = inspect.signature(Trainer.__init__).parameters
        self._fixed = frozenset(arguments) | (frozenset(vars(self)) - of_subclass)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ConfigError for a public attribute whose assignment would have no effect."""
        if not name.startswith("_") and "_fixed" in vars(self):
            check_attribute(self, name, self._fixed)
        super().__setattr__(name, value)

    @property
    def state(self) -> TrainingState:
        """Training state other than model and optimizer; assigning calls `restore`."""
        return self._runner.state

    @state.setter
    def state(self, state: TrainingState) -> None:
        self.restore(state)

    def train(
        self,
        steps: int | None = None,
        actions: Iterable[Action] = (),
        *,
        epochs: float | None = None,
        progress: bool = True,
    ) -> dict[str, float]:
        """Makes further updates. Eager, cross-replica context, on all workers.

        Args:
          steps: Number of updates, at least 0.
          actions: Called after every loop; `next_step` of each limits the length of the loop.
          epochs: Number of passes over the training data, instead of `steps`.
          progress: Whether to show a progress bar in a terminal or a notebook.

        Returns:
          Means of loss and metrics since they were last read, here or by an action
          (`read_metrics`). After `request_stop` the metrics are returned but not reset.

        Raises:
          TrainingDiverged: If the loss is not finite, or if `max_skipped_updates` updates in a row
            were skipped.
          KeyboardInterrupt: On SIGINT, in the main thread under Python's default handler. Training
            ends as after `request_stop`: the trainer can be saved, and can train further.
          ConfigError: If not one length is given, the task cannot be trained, the call is within
            `evaluation_weights` or an iterator of `predict_batches` is open, or other variables
            are to be trained than before.
          DataError: If the data cannot be read, or all examples so far have weight 0.
          WorkerLost: If a parameter server was lost.
        """
        self.check_idle("Trainer.train")
        if epochs is not None:
            self.count_examples()
        end = self.step + length_in_steps(steps, epochs, self.steps_per_epoch)
        actions = checked_actions(actions)
        self.check_consistent()
        self._parts.trained.check()
        with (
            deferring_interrupt(self.request_stop, self._runner.stop.withdraw),
            shown(end, progress and self._parts.workers.is_chief, self.peek_metrics) as bars,
        ):
            stopped = self._runner.run(end, [*bars, *actions])
            return self.peek_metrics() if stopped else self.read_metrics()

    def request_stop(self) -> None:
        """Ends `train` after the current update. May be called from any thread.

        On one GPU with resident data, `train` may end up to 32 updates later, of which XLA compiles
        a loop. If `train` is not running, the next call ends before its first update. Several
        workers end together, after the current loop, if any worker calls this method. With
        parameter servers, training also ends after the current loop.
        """
        self._runner.stop.request()

    def withdraw_stop(self) -> None:
        """Withdraws a request to stop that no training has answered yet."""
        self._runner.stop.withdraw()

    def trace(self) -> None:
        """Traces the training loop without running it, to raise errors in the task early."""
        self._parts.trained.check()
        self._runner.trace()

    def check_finite(self) -> None:
        """Raises TrainingDiverged if a weight, slot, statistic or average is not finite.

        Variables that were not finite when the trainer was made are ignored. Eager, cross-replica
        context, on all workers.
        """
        self._parts.finite.check(self.step)

    def check_consistent(self) -> None:
        """Raises ConfigError if model, optimizer and state do not belong to the same step."""
        self.check_has_own_weights()
        self._runner.check_not_lost()
        optimizer_counts.check(self._parts.update, self.step)

    def busy(self) -> AbstractContextManager[None]:
        """Makes `check_idle` raise an error within the `with` block, as during `train`."""
        return self._runner.busy()

    def check_idle(self, call: str) -> None:
        """Raises ConfigError if `train` is running, in which a callback or an action makes a call.

        Args:
          call: The call, for the error.
        """
        self._runner.check_idle(call)

    def restore(self, state: TrainingState) -> None:
        """Resumes from `state`. Restore the variables of model and optimizer first."""
        self.check_idle("Trainer.restore")
        self._runner.restore(state)
        self._metrics.restart(self.step)
        self.history.drop_after(self.step)
