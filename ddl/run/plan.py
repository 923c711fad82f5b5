"""The plan of a run: its length, the periods of its actions, divergence and warm start."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ddl.callbacks.calling import checked_callbacks
from ddl.callbacks.early_stopping import EarlyStopping
from ddl.callbacks.schedule import Callback
from ddl.checkpoints.retention import Retention
from ddl.checkpoints.warm_start import WarmStart
from ddl.choices import LARGEST_STEP, check_positive
from ddl.errors import ConfigError, check_choice
from ddl.optimizers.schedules import epochs_to_steps
from ddl.run.trackers.tracker import Tracker, checked_trackers


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Lengths and periods of a run, in steps unless stated otherwise. A step is one update.

    Attributes:
      train_steps: Length of the run. Exactly one of `train_steps` and `train_epochs` is given.
      train_epochs: Length of the run in passes over the training data.
      eval_every: Period of evaluations; None evaluates at the end only.
      checkpoint_every: Period of checkpoints; None saves at the end only.
      log_every: Period of training lines in metrics.jsonl.
      retention: Which checkpoints to keep.
      on_divergence: `stop` ends the run with exit status 76. `rewind` restores the last scheduled
        checkpoint and skips the batches up to and including the one that diverged, as in
        Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5.1.
      max_rewinds: Maximum number of rewinds in a run.
      warm_start: Source of a new run's initial weights; None keeps the initializers'. A resumed
        run ignores it.
      early_stopping: Ends the run when its evaluations no longer improve; None trains to the end.
        An `EarlyStopping` among the callbacks is taken out of them and put here.
      callbacks: Functions to call between loops, after evaluations and after saves.
      trackers: Services that get the figures of the run, such as `@MLflow()`.

    Raises:
      ConfigError: If a value is not positive, `callbacks` holds something else or two
        `EarlyStopping`, `trackers` holds something else, `train_steps` is above 2^53, not exactly
        one length is given, `on_divergence` is unknown, or `retention.every` is not a multiple of
        `checkpoint_every`.
    """

    train_steps: int | None = None
    train_epochs: float | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    log_every: int = 100
    retention: Retention = dataclasses.field(default_factory=Retention)
    on_divergence: Literal["stop", "rewind"] = "stop"
    max_rewinds: int = 3
    warm_start: WarmStart | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[Callback | EarlyStopping] = ()
    trackers: Sequence[Any] = ()

    def __post_init__(self) -> None:
        trackers: tuple[Tracker, ...] = checked_trackers(self.trackers, "RunPlan.trackers")
        object.__setattr__(self, "trackers", trackers)
        self._take_early_stopping()
        if (self.train_steps is None) == (self.train_epochs is None):
            remedy = "Set one of them." if self.train_steps is None else "Set one of them to None."
            raise ConfigError(
                "Exactly one of TRAIN_STEPS and TRAIN_EPOCHS must be set, got TRAIN_STEPS = "
                f"{self.train_steps} and TRAIN_EPOCHS = {self.train_epochs}. {remedy}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)):
                check_positive(f"RunPlan.{field.name}", value)
        if (self.train_steps or 0) > LARGEST_STEP:
            raise ConfigError(
                f"RunPlan.train_steps must be at most 2^53 = {LARGEST_STEP:,}, got "
                f"{self.train_steps:,}. Set TRAIN_STEPS to a smaller number."
            )
        self._check_retention()
        check_choice("RunPlan.on_divergence", self.on_divergence, ("stop", "rewind"))

    def _take_early_stopping(self) -> None:
        """Moves an `EarlyStopping` out of `callbacks`."""
        given = checked_callbacks(self.callbacks, "RunPlan.callbacks", EarlyStopping)
        rules = [one for one in given if isinstance(one, EarlyStopping)]
        if self.early_stopping is not None:
            rules.append(self.early_stopping)
        if len(rules) > 1:
            raise ConfigError(
                f"A run has one EarlyStopping, got {len(rules)}. Leave {len(rules) - 1} out of "
                "RunPlan.callbacks and RunPlan.early_stopping."
            )
        object.__setattr__(self, "early_stopping", rules[0] if rules else None)
        others = tuple(one for one in given if not isinstance(one, EarlyStopping))
        object.__setattr__(self, "callbacks", others)

    @property
    def calls(self) -> tuple[Callback, ...]:
        """The callbacks, without an `EarlyStopping`."""
        return tuple(one for one in self.callbacks if isinstance(one, Callback))

    def _check_retention(self) -> None:
        """Raises ConfigError if `retention.every` names steps that are never saved."""
        every, saved_every = self.retention.every, self.checkpoint_every
        if every is None or (saved_every is not None and every % saved_every == 0):
            return
        if saved_every is None:
            raise ConfigError(
                f"Retention.every is {every:,}, but CHECKPOINT_EVERY is None, so only the last "
                f"step is saved. Set CHECKPOINT_EVERY = {every}, or Retention.every = None."
            )
        nearest = max(1, round(every / saved_every)) * saved_every
        raise ConfigError(
            f"Retention.every must be a multiple of CHECKPOINT_EVERY = {saved_every}, since no "
            f"other steps are saved, got {every}. Set Retention.every = {nearest}, or change "
            "CHECKPOINT_EVERY."
        )

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Returns the length of the run in steps; a fraction of a batch counts as a whole one.

        Raises:
          ConfigError: If it is given in epochs, and the data have no known length.
        """
        if self.train_epochs is None:
            return int(self.train_steps or 0)
        if steps_per_epoch is None:
            raise ConfigError(
                "TRAIN_EPOCHS needs training data of known length, got data without. Set "
                "TRAIN_STEPS, or pass the number of examples: ddl.data.stream(…, length=…)."
            )
        return epochs_to_steps(self.train_epochs, steps_per_epoch)
