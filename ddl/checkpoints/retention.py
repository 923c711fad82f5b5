"""The choice of checkpoints to keep."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ddl.checkpoints.directory import SavedCheckpoint
from ddl.errors import ConfigError
from ddl.figures import Direction, direction_of


@dataclasses.dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the last few, those at every N steps, and the best.

    During training the folder holds one checkpoint more, since old ones are removed before the
    next write. The best checkpoint is found from the metrics saved with each checkpoint; no other
    file records it.

    Attributes:
      last: How many of the latest checkpoints to keep. A checkpoint saved on a signal does not
        count; it is kept while it is the newest.
      every: Steps; checkpoints at multiples of it are kept for good. None keeps none this way.
      best_metric: Evaluation metric, such as `accuracy`, by which the best checkpoint is kept;
        None keeps none this way. An evaluation better than all before it saves a checkpoint.
      best_mode: `max` or `min`; None takes the smallest loss or the largest accuracy. Any other
        metric requires it.

    Raises:
      ConfigError: If a number is below 1, or `best_mode` is missing, unknown, or given without a
        `best_metric`.
    """

    last: int = 3
    every: int | None = None
    best_metric: str | None = None
    best_mode: Direction | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Retention.{name} must be at least 1, got {value}.")
        if self.best_metric is not None:
            direction_of(self.best_metric, self.best_mode, "Retention.best_mode")
        elif self.best_mode is not None:
            raise ConfigError(
                f"Retention.best_mode is {self.best_mode!r}, but Retention.best_metric is None. "
                "Set best_metric, or leave best_mode out."
            )

    def best(self, saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """Returns the best checkpoint, the earliest among equals; None if none was evaluated."""
        rated = [each for each in saved if not math.isnan(self._rating(each.metadata.metrics))]
        return max(rated, key=lambda each: self._rating(each.metadata.metrics), default=None)

    def improves(self, metrics: Mapping[str, float], saved: Sequence[SavedCheckpoint]) -> bool:
        """Returns whether a checkpoint with these metrics would be better than all in `saved`."""
        best = self.best(saved)
        # A NaN rating is greater than nothing, so it never improves.
        return self._rating(metrics) > (
            -math.inf if best is None else self._rating(best.metadata.metrics)
        )

    def removable(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Returns the checkpoints that need not be kept; `saved` is sorted by step."""
        scheduled = [each for each in saved if each.metadata.scheduled]
        stays = {each.step for each in (*saved[-1:], *scheduled[-self.last :])}
        stays |= {each.step for each in scheduled if self.every and each.step % self.every == 0}
        if best := self.best(saved):
            stays.add(best.step)
        return [each for each in saved if each.step not in stays]

    def _rating(self, metrics: Mapping[str, float]) -> float:
        """Returns a rating, higher is better; NaN if `metrics` lacks the metric."""
        if self.best_metric is None:
            return math.nan
        value = metrics.get(self.best_metric, math.nan)
        if not math.isfinite(value):  # no checkpoint holds it
            return math.nan
        direction = direction_of(self.best_metric, self.best_mode, "Retention.best_mode")
        return value if direction == "max" else -value
