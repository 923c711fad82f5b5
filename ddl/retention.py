"""Which checkpoints stay."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ddl.checkpoint_directory import SavedCheckpoint
from ddl.errors import ConfigError, check_choice


@dataclasses.dataclass(frozen=True)
class Retention:
    """The last few, every so many steps, and the best.

    Which is best follows from what is saved with each checkpoint, so that there is nothing else
    to be kept in step with them.

    Attributes:
      last: How many of the latest stay.
      every: Checkpoints of steps that are multiples of this stay for good; None: of none.
      metric: The evaluation figure by which the best one stays; None: no best one.
      mode: Whether the largest or the smallest is best; None takes the smallest of a loss and
        the largest of all else.
    """

    last: int = 3
    every: int | None = None
    metric: str | None = None
    mode: Literal["max", "min"] | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("the mode of the best checkpoint", self.mode, ("max", "min"))
            if self.metric is None:
                raise ConfigError("a mode of the best checkpoint is given, but no metric for it")

    def best(self, saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """The best by the metric, the earliest of equals; None if none was evaluated."""
        rated = [each for each in saved if not math.isnan(self._rating(each.facts.metrics))]
        return max(rated, key=lambda each: self._rating(each.facts.metrics), default=None)

    def improves(self, figures: Mapping[str, float], saved: Sequence[SavedCheckpoint]) -> bool:
        """Whether a checkpoint with these figures would be the best."""
        best = self.best(saved)
        rating = self._rating(figures)
        if best is None:
            return not math.isnan(rating)
        return rating > self._rating(best.facts.metrics)

    def superfluous(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Those that need not stay."""
        best = self.best(saved)
        return [
            each
            for each in saved[: -self.last]
            if each is not best and not (self.every and each.step % self.every == 0)
        ]

    def _rating(self, figures: Mapping[str, float]) -> float:
        """The higher the better; NaN where there is no such figure."""
        if self.metric is None:
            return math.nan
        value = figures.get(self.metric, math.nan)
        mode = self.mode or ("min" if self.metric.endswith("loss") else "max")
        return value if mode == "max" else -value
