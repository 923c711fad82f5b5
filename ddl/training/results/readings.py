"""Values read from a trainer's state: steps, rates, scales and means of metrics."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ddl.training import optimizer_counts
from ddl.training.assembly import Assembly
from ddl.training.loop import TrainingLoop
from ddl.training.metric_reader import MetricReader
from ddl.training.results.history import History
from ddl.training.runner import LoopRunner


class Readings:
    """The part of `ddl.Trainer` that only reads its state."""

    history: History
    _parts: Assembly
    _runner: LoopRunner
    _metrics: MetricReader

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Names ddl's counterparts of Keras's methods."""
            if name in ("fit", "compile"):
                raise AttributeError(
                    f"A Trainer has no method {name!r}. Write ddl.fit(trainer, train_epochs=5) for "
                    "a whole run, or trainer.train(epochs=5)."
                )
            return super().__getattribute__(name)  # raises its own error

    @property
    def step(self) -> int:
        """Number of updates made so far."""
        return self._runner.step

    @property
    def restores(self) -> int:
        """Number of states that were restored so far."""
        return self._runner.restores

    @property
    def trace_count(self) -> int:
        """Number of traces of the training loop: 1 after the first call, with no retrace later."""
        return self._runner.loop.trace_count

    @property
    def variables_in_use(self) -> list[tf.Variable]:
        """Variables that the traced loop reads or writes, with each replica's copy.

        Without those that hold values during an update alone. Empty before the first trace, and
        always empty with parameter servers.
        """
        loop = self._runner.loop
        sharding = self._parts.update.sharding
        used = loop.variables if isinstance(loop, TrainingLoop) else []
        stand_ins = frozenset() if sharding is None else sharding.handles_of_stand_ins
        return [variable for variable in used if id(variable.handle) not in stand_ins]

    @property
    def seconds_of_input(self) -> float | None:
        """Seconds that the training loop waited for batches, those of its first call left out.

        0 for arrays that the loop itself gathers from; None where it cannot be measured: batches
        that are copied to GPUs or TPUs ahead, and parameter servers.
        """
        loop = self._runner.loop
        wait = loop.input_wait if isinstance(loop, TrainingLoop) else None
        return None if wait is None else wait.seconds()

    @property
    def skipped_updates(self) -> int:
        """Number of updates skipped so far because a gradient was not finite."""
        state = self._runner.state
        return int(state.batches) - int(state.batches_left_out) - int(state.step)

    @property
    def loss_scale(self) -> float | None:
        """Current loss scale; None without loss scaling."""
        return float(self._runner.state.loss_scale) if self._parts.update.loss_scale else None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update, or of the first; ConfigError for several optimizers."""
        return optimizer_counts.learning_rate(self._parts.update, self.step)

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rate of each optimizer, as "learning_rate" or "learning_rate/NAME"."""
        return optimizer_counts.learning_rates(self._parts.update, self.step)

    def read_metrics(self) -> dict[str, float]:
        """Returns the means of loss and metrics since the last read, and resets them.

        Adds them to `history`. With `clip_norm`, the result also holds "gradient_norm", the mean
        global norm before clipping, with a "/NAME" for each of several optimizers.

        Raises:
          DataError: If the feature "weight" was 0 for all examples so far.
        """
        state = self._runner.state
        is_new = self.step > self._metrics.last_read
        self._metrics.check_some_weight(state)
        means = self.peek_metrics()
        self._runner.state = state.without_metrics()
        if is_new:
            self._record("train", means)
        return means

    def peek_metrics(self) -> dict[str, float]:
        """Returns the same means as `read_metrics`, without resetting or recording them."""
        return self._metrics.means(self._runner.state)

    def _record(self, split: str, figures: dict[str, float]) -> None:
        """Adds figures of this step to the history."""
        self.history.write(self.step, self.epoch_at(self.step), split, figures)

    @property
    def num_examples(self) -> int | None:
        """Number of training examples, of the first source; None if it is unknown or endless."""
        return self._parts.first.num_examples

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates in which each example of the first source is seen once; None as above."""
        return self._parts.first.steps_per_epoch

    def count_examples(self) -> None:
        """Finds out `num_examples` of data of unknown length, by reading them once.

        Raises:
          DataError: If the data have no end.
        """
        self._parts.first.count_examples()

    def epoch_at(self, step: int) -> float:
        """Returns the passes over the training data at a step; 0 for data of unknown length."""
        return step / self.steps_per_epoch if self.steps_per_epoch else 0.0
