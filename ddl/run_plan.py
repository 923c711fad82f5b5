"""How long a run is, what happens when, and what a run may go on with."""

import dataclasses
from typing import Literal

from ddl.errors import ConfigError, check_choice
from ddl.lengths import epochs_to_steps
from ddl.retention import Retention
from ddl.warm_start import WarmStart


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Lengths and periods of a run, in steps unless said otherwise. A step is one update.

    Attributes:
      train_steps: Length of the run; exactly one of this and `train_epochs` is given.
      train_epochs: Length of the run in passes over the training data.
      eval_every: Period of evaluations; None evaluates at the end only.
      checkpoint_every: Period of checkpoints; None saves at the end only.
      log_every: Period of lines in metrics.jsonl.
      retention: Which checkpoints stay.
      on_divergence: `stop` ends the run with status 76. `rewind` goes back to the last checkpoint
        and leaves out the batches from there to the one with which training diverged, as
        Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5.1.
      max_rewinds: How often a run may do that.
      warm_start: Weights that a new run begins with.
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

    def __post_init__(self) -> None:
        if (self.train_steps is None) == (self.train_epochs is None):
            given = "neither" if self.train_steps is None else "both"
            raise ConfigError(
                f"TRAIN_STEPS is {self.train_steps} and TRAIN_EPOCHS is {self.train_epochs}: "
                f"{given} of them is given. Give exactly one, and None for the other."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{field.name} is {value}; it is more than 0")
        check_choice("on_divergence", self.on_divergence, ("stop", "rewind"))

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in steps; a part of an epoch counts its last batch whole."""
        if self.train_epochs is None:
            return int(self.train_steps or 0)
        return epochs_to_steps(self.train_epochs, steps_per_epoch)
