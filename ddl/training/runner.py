"""The repeated calls of the training loop, the work between them, and the weights meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import keras
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.layers.checks import FixedValues
from ddl.optimizers.weight_average import WeightAverages, restoring
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.tasks.parts import copies_of, layers_of, own_variables_of
from ddl.tasks.task import Task
from ddl.training.asynchronous import CoordinatedLoop
from ddl.training.checks import check_same_on_replicas, check_state_finite
from ddl.training.loop import HostScalar, TrainingLoop
from ddl.training.pace import Pace

AfterLoop = Callable[[int], None]
"""Work between training loops, called after each that made updates, with the step reached.

If it has a method `next_step`, this returns the first step after a given one at which a loop must
end, or None.
"""


class EvaluationWeights:
    """Gives the model the averages of its weights within a `with` block, if a trainer keeps some.

    An evaluation never changes the run.
    """

    def __init__(self, averages: WeightAverages | None, task: Task):
        """Keeps the averages that the trainer keeps, if any; changes no variable."""
        # A layer or a loss of the user's may write these whether it trains or not.
        layers = layers_of(task)
        every = own_variables_of(task, layers)
        for layer in layers:
            if not isinstance(layer, keras.layers.BatchNormalization):
                every += [v.value for v in layer._non_trainable_variables]
        self._written = [copy for variable in every for copy in copies_of(variable)]
        self._averages = averages
        self._blocks = 0
        self._restoring = ExitStack()

    @contextmanager
    def applied(self, averaged: bool = True) -> Iterator[None]:
        """Assigns the weights for evaluation within the `with` block.

        Weights become their averages, if kept and if `averaged` is True. Afterwards all values are
        restored bit for bit. A nested block changes nothing. Blocks of generators may end in any
        order: the last one that ends restores the values. Eager, cross-replica context, on all
        workers.
        """
        if not self._blocks:
            with ExitStack() as stack:
                stack.enter_context(restoring(self._written))
                if averaged and self._averages is not None:
                    stack.enter_context(self._averages.applied())
                self._restoring = stack.pop_all()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._restoring.close()

    def check_not_applied(self) -> None:
        """Raises ConfigError within `applied`."""
        if self._blocks:
            raise ConfigError(
                "The model holds the evaluation weights. Leave the evaluation_weights() block, and "
                "read the iterators of predict_batches to their end or close() them, before "
                "training, saving or restoring."
            )


class LoopRunner:
    """Calls the training loop and keeps the state. Eager, cross-replica context, on all workers.

    Attributes:
      state: The state that the last loop reached, or that was restored since.
      loop: The training loop.
      stop: Whether a loop must end. May be assigned from any thread.
      fixed: The choice of trained variables and other settings, which stay as they are.
      weights: The weights for evaluation, which must not stay in the model.
    """

    def __init__(
        self, train_step: TrainStep, workers: Workers, pace: Pace, max_skipped_updates: int
    ):
        """Builds the loop and the initial state; traces nothing.

        Args:
          train_step: Makes one update.
          workers: The workers of the strategy.
          pace: Measures the loops and says how long they are.
          max_skipped_updates: Consecutive skipped updates after which training counts as diverged.
        """
        scale = train_step.loss_scale.initial if train_step.loss_scale else 1.0
        sums, optimizers = train_step.metrics.zeros(), len(train_step.plan.groups)
        self.state = TrainingState.initial(scale, sums, optimizers)
        self.stop = HostScalar(False, tf.bool)
        self.loop: TrainingLoop | CoordinatedLoop
        if traits_of(train_step.gradient.strategy).asynchronous:
            self.loop = CoordinatedLoop(train_step, self.state)
        else:
            self.loop = TrainingLoop(train_step, max_skipped_updates, self.stop)
        self.fixed = FixedValues(train_step.task, layers_of(train_step.task), train_step.optimizers)
        self.weights = EvaluationWeights(train_step.averages, train_step.task)
        self._has_run = self._is_busy = False
        self._train_step, self._workers, self._pace = train_step, workers, pace
        self._max_skipped_updates = max_skipped_updates
        self._lost_at: int | None = None  # the step after which a loop was cut off

    @property
    def step(self) -> int:
        """Number of updates made so far."""
        return int(self.state.step)

    def run(self, end: int, after_loop: Sequence[AfterLoop]) -> bool:
        """Runs loops, and functions after each, up to step `end`.

        Returns:
          Whether training was stopped before.

        Raises:
          TrainingDiverged: If the state is not finite, or too many updates were skipped.
          ConfigError: If a function changed a setting, or left the evaluation weights in the
            model; or if replicas differ in a variable after the first loop.
        """
        self._is_busy = True
        try:
            while (step := self.step) < end:
                ends = [end, step + self._workers.broadcast(self._pace.steps_per_loop)]
                ends += [a.next_step(step) or end for a in after_loop if hasattr(a, "next_step")]
                self._run_loop(min(ends))
                if self.step > step:  # else those of this step have been called already
                    for function in after_loop:
                        function(self.step)
                    if after_loop:
                        self.fixed.check()
                        self.weights.check_not_applied()
                if self._workers.any(bool(self.stop.read())):
                    self.stop.assign(False)
                    return True
        finally:
            self._is_busy = False
        return False

    def _run_loop(self, end: int) -> None:
        """Runs one loop, to step `end` or less far, and checks what it reached."""
        start, is_first, began = self.step, not self._has_run, self._pace.clock()
        self.loop.trace(self.state)
        # After an error in the loop, model and optimizer are ahead of the state.
        self._lost_at = start
        self.state = self.loop.run(self.state, end)
        reached = self.step  # waits for the devices
        self._lost_at, self._has_run = None, True
        seconds, waited = self._pace.clock() - began, self.loop.take_waited()
        self._pace.add(reached - start, seconds, waited, traced=is_first)
        check_state_finite(self.state, self._train_step, self._max_skipped_updates)
        if is_first:
            check_same_on_replicas(self._train_step.task, self._train_step.gradient.strategy)

    def restore(self, state: TrainingState) -> None:
        """Takes over a state to which model and optimizer belong."""
        self.state, self._lost_at = state, None

    def check_idle(self, call: str) -> None:
        """Raises ConfigError while `run` calls a callback, and within `weights.applied`."""
        if self._is_busy:
            raise ConfigError(
                f"{call} was called by a callback, while Trainer.train runs. To end "
                "the run, call trainer.request_stop()."
            )
        self.weights.check_not_applied()

    def check_not_lost(self) -> None:
        """Raises ConfigError if an error cut off a loop, so that the state is not known."""
        if self._lost_at is not None:
            raise ConfigError(
                f"An error ended the training loop after step {self._lost_at:,}, and the model may "
                "have made further updates. Restore a checkpoint with restore_latest, or create a "
                "new model, optimizer and Trainer."
            )
