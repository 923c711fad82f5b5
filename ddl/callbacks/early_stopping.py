"""The end of a run whose evaluations no longer improve."""

import dataclasses
import math

from ddl.errors import ConfigError
from ddl.figures import Direction, direction_of


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after `patience` evaluations in a row that do not improve on the best before.

    A resumed run counts the earlier evaluations too: those of metrics.jsonl, or those of the
    trainer's history in a run without a directory.

    Attributes:
      metric: Figure of the evaluations, such as `accuracy`.
      patience: Number of evaluations, at least 1.
      mode: `max` or `min`; None takes the smallest loss or the largest accuracy. Any other metric
        requires it.

    Raises:
      ConfigError: If `patience` is not an integer of at least 1, or `mode` is missing or unknown.
    """

    metric: str = "loss"
    patience: int = 3
    mode: Direction | None = None

    def __post_init__(self) -> None:
        if isinstance(self.patience, bool) or not isinstance(self.patience, int):
            raise ConfigError(f"EarlyStopping.patience must be an integer, got {self.patience!r}.")
        if self.patience < 1:
            raise ConfigError(f"EarlyStopping.patience must be at least 1, got {self.patience}.")
        direction_of(self.metric, self.mode, "EarlyStopping.mode")


class Evaluations:
    """The evaluations of a run so far, by an `EarlyStopping`."""

    def __init__(self, rule: EarlyStopping):
        """Begins without evaluations."""
        self.rule = rule
        self._falls = direction_of(rule.metric, rule.mode, "EarlyStopping.mode") == "min"
        self._values: dict[int, float] = {}

    def add(self, step: int, value: float | None) -> None:
        """Adds the metric's value at a step; a NaN or None is no improvement."""
        value = math.nan if value is None else value
        self._values[step] = -value if self._falls else value

    def drop_after(self, last_step: int) -> None:
        """Drops the evaluations of steps after `last_step`."""
        self._values = {step: v for step, v in self._values.items() if step <= last_step}

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation, the first of equals; None if there is none."""
        rated = {step: v for step, v in self._values.items() if not math.isnan(v)}
        return max(rated, key=rated.__getitem__, default=None)

    @property
    def are_over(self) -> bool:
        """Whether the last `patience` evaluations did not improve."""
        best = self.best_step
        since = [step for step in self._values if best is None or step > best]
        return len(since) >= self.rule.patience

    def __str__(self) -> str:
        """Returns why the run ends."""
        rule, best = self.rule, self.best_step
        name = rule.metric.replace("_", " ")
        if best is None:
            return f"{name} was not a number in {rule.patience} evaluations"
        value = -self._values[best] if self._falls else self._values[best]
        return (
            f"{name} has not improved on {value:.6g}, of step {best:,}, in {rule.patience} "
            "evaluations"
        )
