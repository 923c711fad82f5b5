"""How long a run is, and what happens when."""

import dataclasses
import math

from ddl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Lengths and periods of a run, in steps unless said otherwise. A step is one update.

    Attributes:
      train_steps: Length of the run; exactly one of this and `train_epochs` is given.
      train_epochs: Length of the run in passes over the training data.
      eval_every: Period of evaluations; None evaluates at the end only.
      checkpoint_every: Period of checkpoints; None saves at the end only.
      log_every: Period of lines in metrics.jsonl.
      checkpoints_to_keep: How many of the latest checkpoints stay.
    """

    train_steps: int | None = None
    train_epochs: float | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    log_every: int = 100
    checkpoints_to_keep: int = 3

    def __post_init__(self) -> None:
        if (self.train_steps is None) == (self.train_epochs is None):
            given = "neither" if self.train_steps is None else "both"
            raise ConfigError(
                f"TRAIN_STEPS is {self.train_steps} and TRAIN_EPOCHS is {self.train_epochs}: "
                f"{given} of them is given. Give exactly one, and None for the other."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ConfigError(f"{field.name} is {value}; it is more than 0")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in steps; a part of an epoch counts its last batch whole."""
        if self.train_epochs is None:
            return int(self.train_steps or 0)
        return math.ceil(self.train_epochs * steps_per_epoch)
