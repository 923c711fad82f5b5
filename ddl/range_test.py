"""A learning rate range test: Smith 2017, "Cyclical learning rates for training neural networks".

A model is trained from fresh weights while the rate grows exponentially from update to update, and
the loss of each batch is noted, until training diverges. Where the loss falls fastest, the rate is
large enough to learn and well below where it diverges.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras.optimizers import schedules

from ddl.errors import ConfigError, TrainingDiverged
from ddl.learning_rate import LearningRate
from ddl.trainer import Trainer

_FEWEST = 10
_FEW = 5


@dataclasses.dataclass(frozen=True)
class RangeTestResult:
    """What a range test found. Arrays are float64 [updates made].

    Attributes:
      rates: The rate of each update.
      losses: The mean loss of its batch, before the update.
      smoothed: The losses, smoothed without a lag.
      diverged: Whether it ended since training diverged, and not at the largest rate.
      steepest: The rate at which the smoothed loss falls fastest; None if it does not fall.
      at_least_loss: The rate at which it is least.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    diverged: bool
    steepest: float | None
    at_least_loss: float

    @property
    def highest_of_interest(self) -> float:
        """Up to which loss a plot shows what came before the divergence."""
        fall = self.smoothed[0] - self.smoothed.min()
        return min(float(self.smoothed.max()), float(self.smoothed[0] + 0.5 * fall))

    def to_dict(self) -> dict[str, Any]:
        """The same as numbers and lists, for JSON."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """How a range test is made.

    It ends early when training diverges: when a loss is not finite, or the mean of the last few is
    above the first few again after it had fallen, or far above them.

    Attributes:
      smallest: The rate of the first update.
      largest: That of the last one, unless training diverges before.
      steps: How many updates.
      smoothing: Width of the Gaussian that losses are smoothed with, as a share of `steps`.
    """

    smallest: float = 1e-6
    largest: float = 10.0
    steps: int = 200
    smoothing: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.smallest < self.largest < math.inf:
            raise ConfigError(
                f"the range is from {self.smallest:g} to {self.largest:g}; both are more than "
                "0, and the second is the larger"
            )
        if self.steps < _FEWEST:
            raise ConfigError(f"the range test has {self.steps} steps; it has {_FEWEST} or more")
        if not 0 < self.smoothing < 1:
            raise ConfigError(f"smoothing is {self.smoothing}; it lies between 0 and 1")

    def run(self, trainer: Trainer) -> RangeTestResult:
        """Makes the test. The trainer is used up by it: make another one to train.

        Args:
          trainer: One that has made no update. Its optimizer's learning rate is replaced.

        Raises:
          ConfigError: If it has made updates, or diverges at the smallest rates.
        """
        if trainer.step:
            raise ConfigError(
                f"the trainer has made {trainer.step:,} updates; a range test begins with fresh "
                "weights. Make a new trainer for it."
            )
        growth = self.largest / self.smallest
        schedule = LearningRate(schedules.ExponentialDecay(self.smallest, self.steps - 1, growth))
        trainer.optimizer.learning_rate = schedule
        losses: list[float] = []
        diverged = False
        while len(losses) < self.steps and not diverged:
            try:
                losses.append(trainer.train(1)["loss"])
            except TrainingDiverged:
                diverged = True
                break
            diverged = _has_diverged(losses)
        rates = self.smallest * growth ** (np.arange(len(losses)) / (self.steps - 1))
        if diverged and len(losses) <= _FEWEST:
            raise ConfigError(
                f"training diverged within {_FEWEST} updates of the range test, the first at "
                f"a learning rate of {self.smallest:g}. Begin with a smaller one."
            )
        smoothed = smooth(np.array(losses), self.smoothing * self.steps)
        slope = np.gradient(smoothed)
        steepest = int(np.argmin(slope))
        # Of a loss that does not fall the slope is noise.
        falls = slope[steepest] < 0 and smoothed.min() < 0.95 * smoothed[0]
        return RangeTestResult(
            rates=rates,
            losses=np.array(losses),
            smoothed=smoothed,
            diverged=diverged,
            steepest=float(rates[steepest]) if falls else None,
            at_least_loss=float(rates[int(np.argmin(smoothed))]),
        )


def _has_diverged(losses: Sequence[float]) -> bool:
    if len(losses) < _FEWEST:
        return False
    means = np.convolve(losses, np.full(_FEW, 1 / _FEW), mode="valid")
    first, last = means[0], means[-1]
    had_fallen = first - means.min() > 0.1 * abs(first)
    return bool(had_fallen and last > first) or bool(last > first + 3 * abs(first) > first)


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Means of the values around each, with Gaussian weights.

    An average of the values so far would lag behind, and its slope with it.

    Args:
      values: float64 [n].
      width: Standard deviation of the Gaussian in places.

    Returns:
      float64 [n].
    """
    places = np.arange(len(values))
    weights = np.exp(-0.5 * ((places[:, None] - places) / width) ** 2)
    return weights @ values / weights.sum(axis=1)
