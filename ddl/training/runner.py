"""The state of a Trainer, and the repeated calls of its training loop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.training.actions import Action
from ddl.training.asynchronous.loop import CoordinatedLoop
from ddl.training.checks.fixed_settings import TrainedVariables
from ddl.training.checks.same_on_replicas import check_same_on_replicas
from ddl.training.divergence import check_state_finite
from ddl.training.evaluation_weights import EvaluationWeights
from ddl.training.loop import TrainingLoop
from ddl.training.loop.stop_flag import StopFlag
from ddl.training.pace import Pace


class LoopRunner:
    """Calls the training loop and keeps the state. Eager, cross-replica context, on all workers.

    Attributes:
      state: The state that the last loop reached, or that was restored since.
      loop: The training loop.
      stop: Flag that ends a loop.
      restores: Number of states that were restored so far.
    """

    def __init__(
        self,
        update: TrainStep,
        workers: Workers,
        pace: Pace,
        trained: TrainedVariables,
        weights: EvaluationWeights,
        max_skipped_updates: int,
    ):
        """Builds the loop and the initial state; traces nothing.

        Args:
          update: Makes one update.
          workers: The workers of the strategy.
          pace: Measures the loops and says how long they are.
          trained: The choice of trained variables, which an action must not change.
          weights: The weights for evaluation, which an action must not leave in the model.
          max_skipped_updates: Consecutive skipped updates after which training counts as diverged.
        """
        scale = update.loss_scale.initial if update.loss_scale else 1.0
        self.state = TrainingState.initial(
            scale,
            update.metrics.zeros(),
            len(update.plan.groups),
        )
        self.stop = StopFlag(workers)
        self.loop: TrainingLoop | CoordinatedLoop
        if traits_of(update.strategy).asynchronous:
            self.loop = CoordinatedLoop(update, self.state)
        else:
            self.loop = TrainingLoop(update, max_skipped_updates, self.stop)
        self._has_run = False
        self._is_busy = False
        self._update = update
        self._workers = workers
        self._pace = pace
        self._trained = trained
        self._weights = weights
        self._max_skipped_updates = max_skipped_updates
        self._lost_at: int | None = None  # the step after which a loop was cut off
        self.restores = 0

    @property
    def step(self) -> int:
        """Number of updates made so far."""
        return int(self.state.step)

    def run(self, end: int, actions: Sequence[Action]) -> bool:
        """Runs loops and the actions after each, up to step `end`.

        Returns:
          Whether training was stopped before.

        Raises:
          TrainingDiverged: If the state is not finite, or too many updates were skipped.
          ConfigError: If an action changed a setting, or left the evaluation weights in the model;
            or if replicas differ in a variable after the first loop.
        """
        with self.busy():
            return self._run(end, actions)

    def _run(self, end: int, actions: Sequence[Action]) -> bool:
        while (step := self.step) < end:
            ends = [end, step + self._workers.broadcast(self._pace.steps_per_loop)]
            ends += [stop for a in actions if (stop := a.next_step(step)) is not None]
            self.run_loop(min(ends))
            if self.step > step:  # else the actions of this step have run already
                for action in actions:
                    action(self.step)
                if actions:
                    self._trained.check()
                    self._weights.check_not_applied()
            if self.stop.take():
                return True
        return False

    def run_loop(self, end: int) -> None:
        """Runs one loop, to step `end` or less far, and checks what it reached."""
        start = self.step
        with self._pace.loop() as timer:
            self.loop.trace(self.state)
            # After an error in the loop, model and optimizer are ahead of the state.
            self._lost_at = start
            self.state = self.loop.run(self.state, end)
            reached = self.step  # waits for the devices
            self._lost_at = None
            timer.steps = reached - start
            timer.traced = not self._has_run
        wait = self.loop.input_wait if isinstance(self.loop, TrainingLoop) else None
        is_first, self._has_run = not self._has_run, True
        if wait is not None and is_first:
            wait.restart()  # the speed leaves this loop out, too
        check_state_finite(self.state, self._update, self._max_skipped_updates)
        if is_first:
            check_same_on_replicas(self._update.task, self._update.strategy)

    def trace(self) -> None:
        """Traces the loop without running it."""
        self.loop.trace(self.state)

    def restore(self, state: TrainingState) -> None:
        """Takes over a state to which model and optimizer belong."""
        self.state, self._lost_at = state, None
        self.restores += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Makes `check_idle` raise an error within the `with` block."""
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    def check_idle(self, call: str) -> None:
        """Raises ConfigError within `busy`, as while `run` calls the loop or an action."""
        if self._is_busy:
            raise ConfigError(
                f"{call} was called by a callback or an action, while Trainer.train runs. A "
                "callback may evaluate, predict and assign to variables. To end the run, call "
                "moment.end(reason) or trainer.request_stop()."
            )

    def check_not_lost(self) -> None:
        """Raises ConfigError if an error cut off a loop, so that the state is not known."""
        if self._lost_at is not None:
            raise ConfigError(
                f"An error ended the training loop after step {self._lost_at:,}, and the model may "
                "have made further updates. Restore a checkpoint with restore_latest, or create a "
                "new model, optimizer and Trainer."
            )
