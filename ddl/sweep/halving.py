"""Successive halving: settings that are worse than the others at a step are not trained further.

All settings train to the first rung, a number of steps. The best share of them goes on to the next
rung, and so on; the last survivors train to their end (Jamieson and Talwalkar, "Non-stochastic Best
Arm Identification and Hyperparameter Optimization", AISTATS 2016). The decisions are a function of
the metrics at the rungs, not of the order in which runs end: a sweep that is killed and started
again decides the same.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ddl.errors import ConfigError
from ddl.figures import Direction
from ddl.sweep.files import Progress


@dataclasses.dataclass(frozen=True)
class Halving:
    """The rungs and the share of the settings that pass each of them.

    Attributes:
      rungs: Steps in ascending order.
      keep: Share of the settings that passes, above 0 and below 1; rounded up.
      direction: Whether the largest or the smallest metric is best.
    """

    rungs: tuple[int, ...]
    keep: float
    direction: Direction

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
          ConfigError: If the rungs do not ascend from 1 on, or `keep` is not between 0 and 1.
        """
        if not self.rungs or self.rungs[0] < 1 or list(self.rungs) != sorted(set(self.rungs)):
            raise ConfigError(
                f"--rungs must be steps in ascending order, such as 100,300, got "
                f"{','.join(map(str, self.rungs))}."
            )
        if not 0 < self.keep < 1:
            raise ConfigError(
                f"--keep must be a share above 0 and below 1, such as 0.5, got {self.keep:g}."
            )


class Decision(NamedTuple):
    """Decision on the next work of a run.

    Attributes:
      action: `train`; `wait` until the others have reached its rung; or `stop`.
      rung: The rung to train to, to wait at or to stop at; None to train to the end.
    """

    action: Literal["train", "wait", "stop"]
    rung: int | None


def decide(
    groups: Mapping[str, Sequence[str]], runs: Mapping[str, Progress], halving: Halving | None
) -> dict[str, Decision]:
    """Returns the decision for each run.

    Runs of one setting that differ in the seed stay together: the mean of their metric counts.

    Args:
      groups: The names of the runs of each setting, in the order of the definition; of equal
        settings, the earlier one passes.
      runs: How far each run has come.
      halving: The rungs; None trains all runs to their end.
    """
    found: dict[str, Decision] = {}
    alive = list(groups)
    for rung in halving.rungs if halving else ():
        values = {name: runs[name].at(rung) for group in alive for name in groups[group]}
        if any(value is None for value in values.values()):
            for name, value in values.items():
                found[name] = Decision("train" if value is None else "wait", rung)
            return found
        assert halving is not None
        number = math.ceil(len(alive) * halving.keep)
        ranked = sorted(
            alive, key=lambda group: _badness([values[n] for n in groups[group]], halving.direction)
        )
        passed = set(ranked[:number])
        for group in alive:
            if group not in passed:
                found.update({name: Decision("stop", rung) for name in groups[group]})
        alive = [group for group in alive if group in passed]
    found.update({name: Decision("train", None) for group in alive for name in groups[group]})
    return found


def _badness(values: Sequence[float | None], direction: Direction) -> float:
    """Returns a number that is smaller for a better setting; infinity if a value is missing."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if len(known) < len(values):
        return math.inf
    mean = math.fsum(known) / len(known)
    return -mean if direction == "max" else mean
