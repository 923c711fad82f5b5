"""A learning rate range test: Smith 2017, "Cyclical learning rates for training neural networks".

The test trains a model from fresh weights and records the loss of each batch, while the learning
rate grows exponentially from update to update, until training diverges. At the rate where the loss
falls fastest, the model learns, and training is well below the rate where it diverges.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers import schedules

from ddl.errors import ConfigError, TrainingDiverged
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.named import by_name
from ddl.training.trainer import Trainer

_FEWEST = 10
_FEW = 5


@dataclasses.dataclass(frozen=True)
class RangeTestResult:
    """The result of a range test. Arrays are float64 [recorded updates].

    Attributes:
      rates: Learning rate of each update.
      losses: Mean loss of each update's batch, before the update.
      smoothed: The losses, smoothed without lag.
      diverged: Whether the test ended because training diverged.
      steepest: Rate at which the smoothed loss falls fastest; None if it does not fall.
      at_least_loss: Rate at which the smoothed loss is smallest.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    diverged: bool
    steepest: float | None
    at_least_loss: float

    @property
    def upper_axis_limit(self) -> float:
        """Upper limit of the loss axis in a plot that cuts off the divergence."""
        fall = self.smoothed[0] - self.smoothed.min()
        return min(float(self.smoothed.max()), float(self.smoothed[0] + 0.5 * fall))

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, booleans and lists, for JSON."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """A learning rate range test and its settings.

    The test ends early when training diverges: a loss is not finite, the mean of the last five
    losses rises above the mean of the first five after it had fallen by more than 10 %, or it
    exceeds four times that mean.

    Attributes:
      smallest: Learning rate of the first update.
      largest: Learning rate of the last update, unless training diverges earlier.
      steps: Number of updates, at least 10.
      smoothing: Standard deviation of the Gaussian that smooths the losses, as a fraction of
        `steps`, between 0 and 1.

    Raises:
      ConfigError: If a setting is out of range.
    """

    smallest: float = 1e-6
    largest: float = 10.0
    steps: int = 200
    smoothing: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.smallest < self.largest < math.inf:
            raise ConfigError(
                "RangeTest needs 0 < smallest < largest < inf, got smallest = "
                f"{self.smallest:g} and largest = {self.largest:g}."
            )
        if self.steps < _FEWEST:
            raise ConfigError(f"RangeTest.steps must be at least {_FEWEST}, got {self.steps}.")
        if not 0 < self.smoothing < 1:
            raise ConfigError(
                f"RangeTest.smoothing must be greater than 0 and less than 1, got {self.smoothing}."
            )

    def run(self, trainer: Trainer) -> RangeTestResult:
        """Runs the test. Eager, cross-replica context.

        Args:
          trainer: A Trainer that has made no update. The test replaces its optimizer's learning
            rate and trains its weights; build a new Trainer for training.

        Raises:
          ConfigError: If the trainer has made updates, or training diverges with at most 10
            losses recorded.
        """
        if trainer.step:
            raise ConfigError(
                "A range test needs a trainer with fresh weights, got one that has made "
                f"{trainer.step:,} updates. Build a new trainer for it."
            )
        optimizer = only_optimizer(trainer)
        growth = self.largest / self.smallest
        schedule = LearningRate(schedules.ExponentialDecay(self.smallest, self.steps - 1, growth))
        optimizer.learning_rate = schedule
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
                f"Training diverged within the first {_FEWEST} updates of the range test, which "
                f"began at a learning rate of {self.smallest:g}. Lower RangeTest.smallest "
                "(--smallest)."
            )
        smoothed = smooth(np.array(losses), self.smoothing * self.steps)
        slope = np.gradient(smoothed)
        steepest = int(np.argmin(slope))
        # If the loss does not fall, its slope is noise.
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
    """Smooths values with a Gaussian centred on each.

    A moving average of past values would lag, and so would its slope.

    Args:
      values: float64 [n].
      width: Standard deviation of the Gaussian, in array positions.

    Returns:
      Smoothed values, float64 [n].
    """
    places = np.arange(len(values))
    weights = np.exp(-0.5 * ((places[:, None] - places) / width) ** 2)
    return weights @ values / weights.sum(axis=1)


def only_optimizer(trainer: Trainer) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a trainer with one optimizer and one loss.

    Raises:
      ConfigError: If the trainer has several of either.
    """
    optimizers = by_name(trainer.optimizer)
    losses = [name for name in trainer.metric_names if name.startswith("loss/")]
    for several in (list(optimizers), losses):
        if len(several) > 1:
            raise ConfigError(
                "A range test varies one learning rate and watches one loss, got a Trainer with "
                f"{', '.join(several)}. Test a task with one optimizer and one loss."
            )
    (optimizer,) = optimizers.values()
    return optimizer
