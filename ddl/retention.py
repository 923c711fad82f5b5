"""Which checkpoints stay."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ddl.checkpoint_directory import SavedCheckpoint
from ddl.errors import ConfigError, check_choice


@dataclasses.dataclass(frozen=True)
class Retention:
    """The last few, every so many steps, and the best; while a run goes on, one more.

    Which is best follows from what is saved with each checkpoint, so that there is nothing else
    to be kept in step with them.

    Attributes:
      last: How many of the latest stay, not counting one that was saved on a signal, which stays
        until the next is saved.
      every: Checkpoints of steps that are multiples of this stay for good; None: of none.
      best_metric: The evaluation figure, such as `accuracy`, by which the best one stays; None: no
        best one. Each evaluation that is better than all before it is saved.
      best_mode: `max` or `min`; None takes the smallest of a loss and the largest of all else.
    """

    last: int = 3
    every: int | None = None
    best_metric: str | None = None
    best_mode: Literal["max", "min"] | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Retention.{name} is {value}; it is 1 or more")
        if self.best_mode is not None:
            check_choice("Retention.best_mode", self.best_mode, ("max", "min"))
            if self.best_metric is None:
                raise ConfigError("Retention.best_mode is given, but no best_metric for it")

    def best(self, saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """The best by the metric, the earliest of equals; None if none was evaluated."""
        rated = [each for each in saved if not math.isnan(self._rating(each.metadata.metrics))]
        return max(rated, key=lambda each: self._rating(each.metadata.metrics), default=None)

    def improves(self, metrics: Mapping[str, float], saved: Sequence[SavedCheckpoint]) -> bool:
        """Whether a checkpoint with these figures would be the best."""
        best = self.best(saved)
        # Nothing is greater than a NaN, nor is one greater than anything.
        return self._rating(metrics) > (
            -math.inf if best is None else self._rating(best.metadata.metrics)
        )

    def superfluous(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Those that need not stay."""
        scheduled = [each for each in saved if each.metadata.scheduled]
        stays = {each.step for each in (*saved[-1:], *scheduled[-self.last :])}
        stays |= {each.step for each in scheduled if self.every and each.step % self.every == 0}
        if best := self.best(saved):
            stays.add(best.step)
        return [each for each in saved if each.step not in stays]

    def _rating(self, metrics: Mapping[str, float]) -> float:
        """The higher the better; NaN where there is no such figure."""
        if self.best_metric is None:
            return math.nan
        value = metrics.get(self.best_metric, math.nan)
        mode = self.best_mode or ("min" if self.best_metric.endswith("loss") else "max")
        return value if mode == "max" else -value
